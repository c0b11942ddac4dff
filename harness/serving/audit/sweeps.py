"""Rules over runs that differ in their load alone, and over how large each run is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.serving.audit.corpus import (
    Audited,
    Corpus,
    load_of,
    new_finding,
    sweeps,
    throughput,
    tokens_per_request,
    tokens_per_slot,
)
from harness.serving.integrity.common import EXACT, apart
from harness.serving.schema import Finding, ServingRun

FALLS = 0.9
SHORT_S = 30.0
ONE_ANSWER = 1024  # tokens; a sustained run gives each slot many answers
RISES = 1.2


def throughput_falls(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """More requests in flight cannot make an engine slower by a tenth unless something else changed: a
    preempted batch, another path, a disturbed run. Such a point is explained before it is quoted."""
    for sweep in sweeps(audited.runs):
        points = [(load_of(run), value.value, run.id) for run in sweep if (value := throughput(run))]
        drops = [
            (after[1] / before[1], i)
            for i, (before, after) in enumerate(pairwise(points))
            if after[0] > before[0] and 0 < before[1] and after[1] < FALLS * before[1]
        ]
        if not drops:
            continue
        share, i = min(drops)
        around = points[i : i + 3]
        shown = ", ".join(f"{value:,.6g} tok/s at {load:g}" for load, value, _ in around)
        kind = "prompts at once" if sweep[0].mode == "offline" else "in flight"
        yield new_finding(
            "throughput_falls",
            "suspect",
            f"throughput falls by {1 - share:.0%} as load rises: {shown} {kind}",
            [name for _, _, name in around],
            before=around[0][1],
            after=around[1][1],
            load=around[1][0],
        )


def output_lengths_differ(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Points of one curve over load are of one workload. Shorter answers end earlier, cost less attention,
    and leave a batch that was never as full as the column says."""
    for sweep in sweeps(audited.runs):
        of, lengths = "a request", {run.id: n for run in sweep if (n := tokens_per_request(run))}
        if not lengths:
            of, lengths = "a request in flight", {run.id: n for run in sweep if (n := tokens_per_slot(run))}
        if lengths and max(lengths.values()) > 1.1 * min(lengths.values()):
            points = ((load_of(run), lengths[run.id]) for run in sweep if run.id in lengths)
            shown = ", ".join(f"{each:.4g} at {load:g}" for load, each in points)
            yield new_finding(
                "output_lengths_differ",
                "suspect",
                f"one table, unequal answers: tokens {of} {shown}",
                list(lengths),
                shortest=min(lengths.values()),
                longest=max(lengths.values()),
            )


def single_wave(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """With no more requests than fit in flight, all start together and the batch only shrinks: the ramp and
    the tail are in the number, a steady state is not."""
    for sweep in sweeps([run for run in audited.runs if run.mode != "offline"]):
        known = {run.id: n for run in sweep if (n := _requests(run))}
        ones = [run for run in sweep if run.id in known and known[run.id] <= 1.01 * load_of(run)]
        if ones:
            shown = ", ".join(f"{known[run.id]:.4g} at {load_of(run):g}" for run in ones)
            text = f"one wave, no steady state: requests {shown} in flight"
        else:
            each = {run.id: n for run in sweep if run.id not in known and (n := tokens_per_slot(run))}
            ones = [run for run in sweep if run.id in each and each[run.id] <= ONE_ANSWER]
            text = (
                (
                    f"a request in flight gave {min(each.values()):.4g} to {max(each.values()):.4g} tokens: "
                    "one answer each, or shorter ones still; no steady state"
                )
                if ones
                else ""
            )
        if ones:
            yield new_finding("single_wave", "suspect", text, [run.id for run in ones], runs=len(ones))


def _requests(run: ServingRun) -> float | None:
    """All that were sent; unknown where the client counts a window's alone."""
    trimmed = run.workload.warmup_s or run.workload.cooldown_s
    return run.workload.num_prompts or (None if trimmed else run.totals.completed)


def short_run(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A few seconds are ramp-up and tail; a pause of half a second is some percent of the number."""
    short = [
        (run.id, out.value, duration)
        for run in audited.runs
        if run.mode != "offline"
        and (duration := run.totals.duration_s)
        and duration < SHORT_S
        and (out := throughput(run))
    ]
    if short:
        _, rate, fastest_s = max(short, key=lambda entry: entry[1])
        durations = [duration for _, _, duration in short]
        yield new_finding(
            "short_run",
            "suspect",
            f"{len(short)} of {len(audited.runs)} runs took under {SHORT_S:g} s "
            f"({min(durations):g} to {max(durations):g}); the fastest of them, {rate:,.6g} tok/s, "
            f"{fastest_s:g} s",
            [name for name, _, _ in short],
            shortest_s=min(durations),
            fastest_s=fastest_s,
        )


def tokens_over_time(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A table's tokens over its seconds are its throughput, within what its digits say."""
    for run in audited.runs:
        tokens, took, out = run.value("tokens"), run.totals.duration_s, throughput(run)
        if tokens and took and out and apart(out.value, tokens / took, took) > EXACT:
            yield new_finding(
                "tokens_over_time",
                "wrong",
                f"{run.id}: {tokens:,.6g} tokens in {took:g} s are {tokens / took:,.6g} tok/s, "
                f"not {out.value:,.6g}",
                [run.id],
                stated=out.value,
                recomputed=tokens / took,
            )


def rate_of_a_request_rises(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Alone a request is served fastest. Where each of several is served faster than one alone, the first
    was measured cold: compiling, capturing graphs, filling caches."""
    for sweep in sweeps(audited.runs):
        rates = [
            (run, m.value / load_of(run)) for run in sweep if (m := throughput(run)) and run.mode != "offline"
        ]
        if not rates:
            continue
        first, alone = rates[0]
        best, rate = max(rates, key=lambda pair: pair[1])
        if rate > RISES * alone:
            yield new_finding(
                "rate_of_a_request_rises",
                "suspect",
                f"a request alone gets less than one of many: {alone:.4g} tok/s at {load_of(first):g} in "
                f"flight, {rate:.4g} each at {load_of(best):g}; the first is likely cold",
                [first.id, best.id],
                alone=alone,
                among_many=rate,
            )


RULES = (
    throughput_falls,
    output_lengths_differ,
    single_wave,
    short_run,
    tokens_over_time,
    rate_of_a_request_rises,
)
