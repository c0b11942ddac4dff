"""The steps of a workload, reduced to a few weighted bins."""

from dataclasses import replace

import pytest

from shapes.bins import (
    MOST_DECODE_BINS,
    decode_bins,
    prefill_bins,
    reduce_chunks,
    reduce_phases,
    reduce_tokens,
    span_of,
    token_bins,
)
from shapes.lengths import parse_span, spread
from shapes.scheduler import Phase, Workload, simulate
from shapes.workloads import documented

WORKLOADS = {name: run.on_rank for name, run in documented().items()} | {
    "ragged": Workload(3200, 800, 128, 500, range_ratio=0.1),
    "ragged mixed": Workload(3200, 800, 64, 500, policy="mixed", token_budget=8192, range_ratio=0.3),
    "short": Workload(100, 40, 16, 100, policy="mixed", token_budget=64),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_bins_keep_the_kv_tokens_of_the_simulation(name):
    phases = [phase for phase in simulate(WORKLOADS[name]) if phase.lengths]
    count = sum(phase.steps for phase in phases)
    requests = sum(phase.steps * len(phase.lengths) for phase in phases)
    tokens = sum(
        phase.steps * sum(phase.lengths) + len(phase.lengths) * phase.steps * (phase.steps - 1) // 2
        for phase in phases
    )
    bins = decode_bins(WORKLOADS[name])
    assert 1 <= len(bins) <= MOST_DECODE_BINS
    assert decode_bins(replace(WORKLOADS[name])) is bins, "made once"
    weights = [b.weight for b in bins]
    assert sum(weights) == pytest.approx(1) and weights == sorted(weights, reverse=True)
    if name in (
        "serving-2000-2000-c10800",
        "serving-3200-800-c128-mixed",
    ):  # others round batches
        isl, osl = WORKLOADS[name].isl, WORKLOADS[name].osl
        spans = [parse_span(b.ctx) for b in bins]
        assert all(isl < low <= high < isl + osl for low, high in spans)
    binned = sum(b.weight * sum(spread(parse_span(b.ctx), b.batch, 0)) for b in bins)
    assert binned == pytest.approx(tokens / count, rel=0.01)
    assert sum(b.weight * b.batch for b in bins) == pytest.approx(requests / count, rel=0.02)


@pytest.mark.parametrize("span", [(100, 100), (3201, 3999), (10, 400)])
@pytest.mark.parametrize("count", [2, 9, 450])
def test_span_of_gives_back_the_span_that_was_spread(span, count):
    lengths = spread(span, count, 0)
    mean = sum(lengths) / count
    variance = sum((length - mean) ** 2 for length in lengths) / count
    found = parse_span(span_of(mean, variance, count, seen=(1, 10_000)))
    assert abs(found[0] - span[0]) <= 1
    assert abs(found[1] - span[1]) <= 1


def test_few_bins_keep_the_tokens_and_no_steps_give_no_bins():
    assert reduce_phases([Phase(16, (100, 200), 0)]) == [(1.0, 2, "108..207")], "it saw 100 to 215"
    assert reduce_phases([Phase(64, (100, 200), 0)], most=1) == [(1.0, 2, "132..231")]
    (only,) = reduce_phases([Phase(10, (100, 300), 0), Phase(30, (1000, 1000), 0)], most=1)
    assert (only.weight, only.batch) == (1.0, 2)
    tokens = (10 * (400 + 9) + 30 * (2000 + 29)) / 40
    assert sum(spread(parse_span(only.ctx), 2, 0)) == pytest.approx(tokens, abs=1)
    assert reduce_phases(simulate(Workload(10, 1, 2, 4))) == []


# Tokens of a step


@pytest.mark.parametrize("name", WORKLOADS)
def test_token_bins_keep_steps_and_tokens(name):
    phases = list(simulate(WORKLOADS[name]))
    steps = sum(phase.steps for phase in phases)
    for prefills in (False, True):
        kind = [phase for phase in phases if bool(phase.prefill) == prefills]
        bins = [b for b in token_bins(WORKLOADS[name]) if bool(b.prompt) == prefills]
        assert len(bins) <= 4
        assert sum(b.weight for b in bins) == pytest.approx(sum(p.steps for p in kind) / steps)
        tokens = sum(p.steps * (p.prefill + len(p.lengths)) for p in kind) / steps
        assert sum(b.weight * b.tokens for b in bins) == pytest.approx(tokens, rel=0.01)
        prompt = sum(p.steps * p.prefill for p in kind) / steps
        assert sum(b.weight * b.prompt for b in bins) == pytest.approx(prompt, rel=0.01)


def test_token_bins_by_hand():
    phases = [Phase(3, (9, 9), 0), Phase(1, (9,), 7, ((7, 0),)), Phase(4, (), 100, ((100, 0),))]
    bins = reduce_tokens(phases)
    assert bins == [(3 / 8, 2, 0), (4 / 8, 100, 100), (1 / 8, 8, 7)]


@pytest.mark.parametrize(("few", "many"), [(2, 40), (40, 2)])
def test_steps_rarer_than_one_in_200_get_no_bin(few, many):
    for steps, bins in ((4, 1), (5, 2)):
        phases = [Phase(steps, (9,) * few, 0), Phase(1000 - steps, (9,) * many, 0)]
        assert len(reduce_tokens(phases)) == bins


# Prompt chunks


@pytest.mark.parametrize("name", WORKLOADS)
def test_prefill_bins_keep_new_tokens_and_nearly_the_attended_pairs(name):
    steps = [
        [(new, prefix + i * new) for new, prefix in phase.chunks]
        for phase in simulate(WORKLOADS[name])
        if phase.chunks
        for i in range(phase.steps)
    ]
    bins = prefill_bins(WORKLOADS[name])
    assert len(bins) <= 4
    if not steps:
        assert bins == ()
        return
    assert sum(b.weight for b in bins) == pytest.approx(1)
    drawn = [(b.weight, spread(parse_span(b.new), b.batch, 0), int(b.prefix)) for b in bins]
    tokens = sum(new for chunks in steps for new, _ in chunks) / len(steps)
    assert sum(weight * sum(new) for weight, new, _ in drawn) == pytest.approx(tokens, rel=0.01)
    pairs = sum(new * (prefix + new / 2) for chunks in steps for new, prefix in chunks) / len(steps)
    binned = sum(weight * n * (prefix + n / 2) for weight, new, prefix in drawn for n in new)
    assert binned == pytest.approx(pairs, rel=0.1), "spread evenly, lengths vary less"


def test_prefill_bins_by_hand():
    """A prompt of 3200 with a budget of 2048; a phase of several steps is split into its steps."""
    phases = [Phase(1, (), 2048, ((2048, 0),)), Phase(1, (5,), 1152, ((1152, 2048),))]
    assert sorted(reduce_chunks(phases)) == [(0.5, 1, "1152", "2048"), (0.5, 1, "2048", "0")]
    assert reduce_chunks([Phase(2, (), 100, ((100, 0),))], most=1) == [(1.0, 1, "100", "50")]


def test_a_negligible_prefix_is_left_out():
    (only,) = reduce_chunks([Phase(1, (), 3300, ((3200, 0), (100, 60)))])
    assert (only.batch, only.prefix) == (2, "0")
