"""Pages as committed in `snapshots/`: all that they say, their tables, the data of their pictures."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness import archive
from harness.page.assemble import assemble, inputs
from harness.page.case import measured_cases
from harness.page.document import Page
from harness.page.ranking import rounds
from harness.page.serving.ledger import ledger_section
from harness.page.serving.replay import replay_section, replays
from harness.paths import RESULTS
from harness.results.schema import CaseDone, Cell, DisturbedRound, Record, Samples
from harness.serving.ledger import ExplanationEntry, LedgerRow, known_rows
from tests.harness.page.serving.entries import observation, prediction
from tests.support.page_text import page_text
from tests.support.paths import DATA
from tests.support.written_runs import case, cell, finished, ranked, verdict, write

SNAPSHOTS = Path(__file__).parent / "snapshots"
COMMITTED = RESULTS / "epyc-zen4-2core"
CPU_SHORT = str(COMMITTED / "serving" / "cpu-short")
TWO = {"torch.sdpa": 200.0, "vllm.amx": 100.0}
THREE = TWO | {"vllm.vec": 150.0}
DISTURBED = [
    DisturbedRound(block=0, round=1, reason="other processes", counted=True),
    DisturbedRound(block=7, round=0, reason="heat", counted=False, seconds={"vllm.amx": 9e-4}),
]
LATER = prediction().model_copy(update={"at": "2026-02-01"})
HEATS = Samples(block=[9], round=[0], seconds=[2e-4])


def page_of(*names: Path) -> Page:
    return assemble(inputs(map(str, names)))


def measured(folder: Path) -> Page:
    """Sizes that vary, all verdicts, disturbed rounds, clocks, rows without a time, an unfinished case."""
    small, large, long, ragged, quantised, broken, last = cases = [
        *(case(1), case(8), replace(case(8, ctx=900), weight=0.6), case(8, ctx="5..20")),
        *(case(64, boundary="with_quant"), case(64, ctx=50, heads=4), case(64)),
    ]
    clock = [{"sm_clock_mhz": {"min": 1.0, "median": 2.0, "max": 4.0}, "not_read": {"heat": "?"}}]
    records: list[Record] = [
        *ranked(small, THREE, conditions=clock),
        *(record.model_copy(update={"eliminations": HEATS} if isinstance(record, Cell) else {})
          for record in ranked(large, THREE, "same", disturbed=DISTURBED, eliminations=1)),
        *ranked(long, THREE, "unclear", disturbed=DISTURBED[:1]),
        *(record for of in (ragged, quantised) for record in ranked(of, TWO)),
        *(cell(broken, "torch.sdpa", 100.0, 1.0), cell(broken, "aiter.asm", None)),
        cell(broken, "triton.split_kv", None, status="checked", reason="interpreted"),
        *(cell(broken, "vllm.amx", None, status="wrong", reason="row 3 is off"), finished(broken)),
        *(record for record in ranked(last, THREE) if not isinstance(record, CaseDone)),
    ]  # fmt: skip
    return page_of(write(folder / "run", records, cases))


def two_runs(folder: Path) -> Page:
    """Of one name, and nobody knows whether their sources differ; and of the same commit."""
    of = [case(8), case(1)]
    old, new = (
        [r for planned in of for r in ranked(planned, THREE | {"vllm.vec": us})] for us in (150.0, 300.0)
    )
    earlier = {"created": "2026-11-23T00:00:00Z"}
    return page_of(
        write(folder / "a/run", old, of), write(folder / "b/run", new, of, **earlier), COMMITTED / "compare"
    )


def gemm(folder: Path) -> Page:
    """Out of order, by sizes that do not go with the load, one of them 0; slower by rounds."""
    of = [replace(case(op="block_scale_gemm", n=n, k=k), weight=weight)
          for n, k, weight in ((4, 0, 0.2), (1, 8, 0.3), (1, 0, 0.4), (2, 0, 0.1))]  # fmt: skip
    records = [
        r for planned in of for r in ranked(planned, {"torch.bf16": 99_999.5, "x.y": 1234.56}, "slower")
    ]
    records += [cell(of[0], "x.z", 1e4, 1e4), finished(of[0])]
    facts = {"settings": {"plain": {"A": "", "B": None}}, "busy": ["a compiler runs"]}
    return page_of(
        write(folder / "run", records, of, **facts), write(folder / "nothing finished", [], [case()])
    )


def settings(folder: Path) -> Page:
    """Of a committed run, and of one with two cases and a setting that failed."""
    cases = [case(batch, op="block_scale_gemm") for batch in (1, 8)]
    records: list[Record] = []
    for of, us in zip(cases, (50.0, None), strict=True):
        facts = {} if us else {"status": "error", "reason": "out of luck"}
        both = cell(of, "torch.bf16", 100.0, 1.0), cell(of, "torch.bf16", us, setting="A=1", **facts)
        records += [*both, *([verdict(both[1], both[0], "unclear", half=2.0)] if us else []), finished(of)]
    facts = {"settings": {"plain": {"A": None}, "A=1": {"A": "1"}}, "flags": {"A": [None, "1"]}}
    return page_of(COMMITTED / "toggle/threads", write(folder / "two", records, cases, **facts))


def replay(folder: Path) -> Page:
    file = COMMITTED / "serving/cpu-default/stages/experts-grouped/replay-decode-0.json"
    document = json.loads(archive.read_bytes(file))
    broken = {"chosen": {"fused_moe": "x"}, "failed": "out of luck", "difference": {"a": 0.01, "b": 0.1}}
    settings = document["replays"][0]["arms"]
    settings["base"]["places_alone"] = {"mla_decode": 4.5, "fused_moe": 20.25}
    settings["experts-grouped"]["places_alone"] = {"fused_moe": 25.5}
    settings["broken"] = broken
    (found,) = replays(document, "")
    step = {"phase": "prefill", "model": "a model", "tokens": 512}
    empty = found.model_copy(update={"arms": {}, "twin": None, "step": step})
    return Page("replay", sections=[replay_section([found, empty, empty], "replay")])


def partial_ledger(folder: Path) -> Page:
    """What was not observed or has no interval says so."""
    rows = [
        LedgerRow(id="a", predictions=(prediction(low=None, high=None),)),
        LedgerRow(id="b", observations=(observation(low=None, high=None),)),
        LedgerRow(id="c"),
        LedgerRow(
            id="d", predictions=(prediction(change=None, high=None, method="bound"),),
            observations=(observation(),),
            explanations=(ExplanationEntry(row="d", text="why"),
                          ExplanationEntry(row="d", text="how", evidence=("a trace", "a run"))),
        ),
        LedgerRow(id="e", predictions=(prediction(change=-20.0, low=-21.0, high=-19.0),),
                  observations=(observation(),)),
        LedgerRow(id="f", predictions=(prediction(unit="1"),), observations=(observation(unit="1"),)),
        LedgerRow(id="g", predictions=(prediction(unit="1"),)),
        LedgerRow(id="h", observations=(observation(unit="1"),)),
        LedgerRow(id="a", ledger="another", predictions=(LATER,), observations=(
            observation(change=-20.0, low=-21.0, high=-19.0), observation(change=0.1, low=-1.0, high=1.0))),
    ]  # fmt: skip
    return Page("ledger", sections=[ledger_section(rows, "partial")])


PAGES: dict[str, Callable[[Path], Page]] = {
    "measured": measured,
    "arms": settings,
    "a GPU": lambda folder: page_of(RESULTS / "h200/mla_decode-b64"),
    "two runs": two_runs,
    "two machines": lambda folder: page_of(*(RESULTS / f"{gpu}/mla_decode-b64" for gpu in ("h100", "h200"))),
    "gemm": gemm,
    "ab": lambda folder: page_of(RESULTS / "epyc-zen3-2core/serving-ab"),
    "ledger": lambda folder: Page("", sections=[ledger_section(list(known_rows([CPU_SHORT])), "cpu-short")]),
    "replay": replay,
    "forecast": lambda folder: page_of(DATA / "page/forecast.json"),
    "compiled": lambda folder: page_of(DATA / "page/compile.json"),
    "partial ledger": partial_ledger,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_and_draws_what_is_committed(snapshot, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    page = PAGES[name](Path())
    snapshot(SNAPSHOTS / f"{name.replace(' ', '-')}.txt", text := page_text(page.sections))
    titles = [line.partition(" [")[0] for line in text.splitlines() if re.match("- .* marks$", line)]
    assert titles == [f"- {chart.title}" for chart in page.charts()], "in the order of the page"
    require_valid(page)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["block_scale_gemm-smoke", "mha_prefill-smoke"], ["serving/cpu-default"], ["engine"]]
)
def test_a_page_of_committed_results_can_be_drawn(names):
    require_valid(page_of(*(COMMITTED / name for name in names)))


def require_valid(page: Page) -> None:
    """Each chart compiles and says how to read it; a link finds one thing."""
    import vl_convert

    from harness.page.style import specification

    charts = list(page.charts())
    anchors = [chart.anchor for chart in charts]
    anchors += [row.anchor for chart in charts if chart.table for row in chart.table.rows if row.anchor]
    assert len(anchors) == len(set(anchors))
    for chart in charts:
        assert chart.title and chart.reading and (chart.picture or chart.table)
        if chart.picture:
            chart.picture.to_dict(validate=True)
            assert chart.marks and vl_convert.vegalite_to_vega(specification(chart))["marks"]


def test_of_many_rounds_some_are_drawn_and_the_disturbed_are_among_them(tmp_path):
    of = case()
    (only,) = measured_cases(write(tmp_path / "run", ranked(of, THREE, disturbed=DISTURBED), [of]))
    thinned = rounds(only, 20)
    from harness.page.style import specification

    (ticks,) = specification(thinned)["datasets"].values()
    assert len(ticks) < 25 and "1 in 3 is drawn" in thinned.reading
    assert {tick["kind"] for tick in ticks} == {"quiet", "disturbed", "left out"}
    assert len(thinned.table.rows) == 49
