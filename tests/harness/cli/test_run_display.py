"""What a run prints, above its line of progress, and when it ends."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.run_display import RunDisplay, end_text
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, DisturbedRound
from harness.run.request import Request
from harness.run.session import Outcome
from shapes.case import Case
from tests.support.calibrated import LIGHT, calibrations
from tests.support.paths import ROOT

RECORDED = Journal(ROOT / "results/epyc-zen4-2core/mla_decode-r1-tp8")
LINE_GONE = "\r\x1b[K"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def outcome(*cases: tuple[str, float], left_out: list[Case], phases: dict[str, float]) -> Outcome:
    """Of cases by key and weight, each of which took 10 s of measuring and 30 s beside."""
    records = []
    for key, weight in cases:
        records.append(
            Cell(
                op="mla_decode", case=key, boundary=key.split()[-1], impl="torch.sdpa", platform="cpu",
                arch="x86", arm="plain", launch="eager", cache="warm", status="ok", weight=weight,
            )
        )  # fmt: skip
        records.append(
            CaseDone(
                case=key, measured_s=10, setup_s=30, rounds=9, blocks=6, stopped="tight", phases=phases
            )
        )  # fmt: skip
    return Outcome(records, len(cases), left_out, 8.0, 25, Path("results/local/run"))


def test_the_end_says_where_the_time_went_and_what_is_left_out():
    left_out = [
        Case("mla_decode", {"batch": i}, boundary, weight=0.25)
        for boundary in ("core", "with_quant")
        for i in (1, 2)
    ]
    phases = {"reference": 10.0, "preparing": 20.0}
    ended = outcome(("a core", 0.5), ("a with_quant", 0.5), left_out=left_out, phases=phases)
    assert end_text(ended).splitlines() == [
        "2 cases: measuring 20.0 s of 88.0 s (23 %); preparing 40.0 s, reference 20.0 s, "
        "starting and ceilings 8.0 s",
        "recorded in results/local/run",
        "as pictures: python -m harness report results/local/run --open",
        "left out, the budget of 25 s being spent: 2 cases of core (50 % of its weight), "
        "2 cases of with_quant (50 % of its weight); more with --resume results/local/run --budget 5m",
    ]

    alone = end_text(outcome(("a core", 0.5), left_out=[], phases={})).splitlines()
    assert alone[0] == (
        "1 case: measuring 10.0 s of 48.0 s (21 %); set-up and checks 30.0 s, starting and ceilings 8.0 s"
    )
    assert len(alone) == 3


def test_the_last_line_says_what_took_the_machine():
    took = "other processes took {}% of a CPU"
    ended = outcome(("a core", 1.0), left_out=[], phases={})
    (done,) = (record for record in ended.records if isinstance(record, CaseDone))
    done.disturbed = [
        DisturbedRound(block=i, round=0, reason=took.format(share), counted=True)
        for i, share in enumerate((90, 98, 99))
    ]
    done.conditions = [{"processes": {"python3 4242": 97}}]
    assert end_text(ended).splitlines()[-1] == (
        "not quiet: 3 of 9 rounds count though something else used the machine, or slowed it "
        "(other processes took 98% of a CPU, most of it python3 4242). For narrower intervals, stop what "
        "runs beside, or give a longer --budget"
    )
    done.disturbed = [round.model_copy(update={"counted": False}) for round in done.disturbed]
    assert "quiet" not in end_text(ended)


def test_the_end_says_how_far_devices_lie_apart_and_which_lags():
    ended = outcome(("a core", 1.0), left_out=[], phases={})
    alone = end_text(ended).splitlines()
    several = replace(ended, calibrations=calibrations({"n1/x": 100.0, "n2/y": 106.0, "n2/z": 100.0}))
    *before, spread, lags = end_text(several).splitlines()
    assert before == alone
    assert spread.startswith("3 devices of type H200 lie apart: the slowest takes 1.060x (1.05")
    assert lags.startswith("n2/y lags: 1.060x (1.05") and lags.endswith(
        f"the median device's time of {LIGHT}"
    )


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


def test_tables_go_beside_json_on_stdout_and_quiet_prints_nothing(first_case, capsys):
    with RunDisplay(Request(json="-")) as display:
        display.case(RECORDED.run(), *first_case)
    printed = capsys.readouterr()
    assert (printed.out, "fastest: vllm.amx" in printed.err) == ("", True)
    with RunDisplay(Request(quiet=True)) as display:
        display.log("a note")
        display.case(RECORDED.run(), *first_case)
        display.end(RECORDED.run(), outcome(left_out=[], phases={}))
    assert capsys.readouterr() == ("", "")
