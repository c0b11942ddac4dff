"""What a run prints, above its line of progress, and when it ends."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli.run_display import RaceTables, RunDisplay, end_text
from harness.results.journal import Journal
from harness.results.schema import CaseDone, DisturbedRound
from harness.run.execute import Outcome
from harness.run.plan import Request, case_of
from shapes.case import Case
from tests.support import written_runs
from tests.support.calibrated import calibrations
from tests.support.command_line import error_line
from tests.support.paths import ROOT
from tests.support.written_runs import a_cell

RECORDED = Journal(ROOT / "results/epyc-zen4-2core/mla_decode-r1-tp8")
LINE_GONE = "\r\x1b[K"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def outcome(*cases: tuple[str, float], left_out: Sequence[Case] = (), **done: Any) -> Outcome:
    """Of cases by key and weight, each of which took 10 s of measuring and 30 s beside."""
    told = {"measured_s": 10, "setup_s": 30, "rounds": 9, "blocks": 6, "stopped": "tight"} | done
    records = []
    for key, weight in cases:
        records += [a_cell(case=key, boundary=key.split()[-1], weight=weight), CaseDone(case=key, **told)]
    return Outcome(records, len(cases), list(left_out), 8.0, 25, Path("results/local/run"))


def disturbed(counted: bool) -> list[DisturbedRound]:
    return [
        DisturbedRound(block=i, round=0, reason=f"other processes took {share}% of a CPU", counted=counted)
        for i, share in enumerate((90, 98, 99))
    ]


REST = [
    Case("mla_decode", {"batch": i}, boundary, weight=0.125)
    for boundary in ("core", "with_quant")
    for i in (1, 2)
]
BUSY = [{"processes": {"python3 4242": 97}}]
ENDS = {
    "cases are left out": outcome(
        ("a core", 0.5), ("a with_quant", 0.5), left_out=REST, phases={"reference": 10.0, "preparing": 20.0}
    ),
    "all were measured": outcome(("a core", 0.5)),
    "rounds count though something took the machine": outcome(
        ("a core", 1.0), disturbed=disturbed(True), conditions=BUSY
    ),
    "rounds that were disturbed do not count": outcome(
        ("a core", 1.0), disturbed=disturbed(False), conditions=BUSY
    ),
    "devices lie apart": replace(
        outcome(("a core", 1.0)), calibrations=calibrations({"n1/x": 100.0, "n2/y": 106.0, "n2/z": 100.0})
    ),
}


def test_the_end_says_what_is_committed(snapshot):
    text = "\n\n".join(f"=== {name}\n{end_text(ended)}" for name, ended in ENDS.items())
    snapshot(Path(__file__).parent / "snapshots" / "ends.txt", text + "\n")


@pytest.fixture
def first_case():
    (key, records), *_ = RECORDED.finished().items()
    planned = next(case for case in RECORDED.run().cases if case.key == key)
    return Case(planned.op, planned.sizes, planned.boundary, planned.place, planned.weight), records


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def test_a_table_takes_the_place_of_the_line_of_progress(terminal, monkeypatch, first_case):
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    with RunDisplay(Request()) as display:
        display.progress.case(first_case[0], 1, 20.0)
        display.progress.say("checking again")
        display.case(RECORDED.run(), *first_case)
        display.progress.case(first_case[0], 1, 20.0)
    shown = [part.rpartition(LINE_GONE)[2] for part in terminal.getvalue().split("\n")]
    assert shown[1] == first_case[0].key
    assert shown[3].startswith("fastest: vllm.amx 33.4 ms")
    assert not any("checking again" in line for line in shown)
    assert shown[-1] == "", "and the last line is gone, too"


@pytest.mark.parametrize("resumed", [None, "results/local/it"])
def test_the_last_lines_are_the_answer(capsys, resumed):
    """Below what was recorded where; and where nothing was left to measure, how to see the tables."""
    records = [record for of_case in RECORDED.finished().values() for record in of_case]
    ended = Outcome(records, 8, [], 8.0, 60.0, RECORDED.folder)
    with RunDisplay(Request(resume=resumed)) as display:
        display.end(RECORDED.run(), ended)
    before, answer = capsys.readouterr().out.split("\n\n")
    assert " ".join(answer.split()) == (
        "fastest in 8 of 8 cases: vllm.amx; all cases together 1.97x vLLM's default vllm.vec (1.87 to 2.08)"
    )
    left = "nothing was left to measure; its tables:\n  python -m harness show results/local/it"
    assert before.endswith(left) == bool(resumed)


@pytest.mark.parametrize("run", ["h200/mla_decode-b64", "h100/mla_decode-toggle", "h200/tune-mla"])
def test_show_prints_what_the_run_printed(here, capsys, run):
    journal = Journal(ROOT / "results" / run)
    recorded = journal.run()
    with RaceTables() if recorded.race else RunDisplay(Request()) as display:
        for planned, records in zip(recorded.cases, journal.finished().values(), strict=True):
            display.case(recorded, case_of(planned), records)
    tables = capsys.readouterr().out
    shown = here("show", ROOT / "results" / run).stdout
    assert tables and tables in shown
    assert ("recommendation:" in shown.rpartition(tables)[2]) == bool(recorded.flags)


def test_the_readme_has_what_show_prints(here):
    shown = here("show", ROOT / "results/h200/mla_decode-b64").stdout
    (example,) = (b for b in (ROOT / "README.md").read_text().split("```") if "GB/s" in b)
    assert example.strip() in shown


def test_show_for_a_pull_request_begins_with_the_summary(here, snapshot):
    shown = here("show", "--markdown", RECORDED.folder, ROOT / "results/h100/mla_decode-toggle").stdout
    heading, summary, *_ = shown.split("\n\n")
    assert heading.startswith("## mla_decode on AMD EPYC, 2026-11-21 22:51 (")
    assert summary.startswith("- fastest in 8 of 8 cases: vllm.amx; ")
    short = shown.replace(str(ROOT), "CHECKOUT").split("### ")
    snapshot(Path(__file__).parent / "snapshots" / "show.md", "### ".join([short[0], short[1], short[-1]]))


def test_show_refuses_what_it_cannot_show(here, tmp_path):
    assert "no run at 'nowhere'" in error_line(here("show", "nowhere"))
    written_runs.write(tmp_path / "run", [], [written_runs.case()])
    assert "no case was finished in " in error_line(here("show", tmp_path / "run"), code=3)


def test_show_takes_unusual_records(here, tmp_path):
    """A case that was not planned or has no row is left out; a time of 0 is none; 1 is no plural."""
    of, empty, other = (written_runs.case(batch) for batch in (1, 2, 3))
    known = written_runs.ranked(of, {"torch.sdpa": 400.0, "x.a": 100.0}, rounds=1, blocks=1)
    known.insert(0, written_runs.cell(of, "x.zero", 100.0).model_copy(update={"time_us": 0.0}))
    unplanned = written_runs.ranked(other, {"torch.sdpa": 400.0, "x.a": 100.0})
    records = [*known, written_runs.finished(empty), *unplanned]
    run = written_runs.write(tmp_path / "run", records, [of, empty])
    shown = here("show", run).stdout
    assert "fastest: x.a 100.0 us" in shown and "x.zero" not in shown and "batch=3" not in shown
    assert "measured  1 round in 1 block, until" in shown
    assert " ".join(shown.splitlines()[-2:]).endswith("; 1 more not measured")
    assert "batch=3" not in here("show", "--markdown", run).stdout


def test_tables_go_beside_json_on_stdout_and_quiet_prints_nothing(first_case, capsys):
    with RunDisplay(Request(json="-")) as display:
        display.case(RECORDED.run(), *first_case)
    printed = capsys.readouterr()
    assert (printed.out, "fastest: vllm.amx" in printed.err) == ("", True)
    with RunDisplay(Request(quiet=True)) as display:
        display.log("a note")
        display.case(RECORDED.run(), *first_case)
        display.end(RECORDED.run(), outcome())
    assert capsys.readouterr() == ("", "")
