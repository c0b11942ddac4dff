"""Runs on a machine whose monitor reports disturbances."""

import itertools
import json
from pathlib import Path

import pytest

from harness.cli.run_display import RunDisplay
from harness.errors import NothingRan
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, Verdict
from harness.run import device
from harness.run.execute import run
from harness.run.plan import Request
from kernels.platform import detect
from tests.support.recorded_verdicts import redo
from tests.support.scripted_monitor import WHO, Scripted
from tests.support.workers_here import captured_here


def measure(out: Path, monitor: Scripted, **options):
    """Runs one tiny case under a monitor. Returns exit code, records by kind, stdout, stderr, and --json."""
    request = Request(
        op="mla_decode",
        impl="torch.naive,torch.sdpa",
        device="cpu",
        case=("batch=1 ctx=5..20",),
        cache="warm",
        budget="10s",  # more than its rounds take, however busy the machine is
        threads=1,
        out=str(out / "run"),
        json=str(out / "run.json"),
        **options,
    )
    with captured_here() as (patch, stdout, stderr):
        patch.setattr(device, "monitor_for", lambda platform, ours: monitor)
        code = run(request, detect("cpu"), RunDisplay(request))
    (recorded,) = Journal(out / "run").finished().values()
    kinds = {kind: [r for r in recorded if isinstance(r, kind)] for kind in (Cell, Verdict, CaseDone)}
    return code, kinds, stdout.getvalue(), stderr.getvalue(), json.loads((out / "run.json").read_text())


def test_disturbed_rounds_are_left_out_counted_and_kept_with_their_reasons(tmp_path):
    """The machine is busy at the start, and disturbed in every third round."""
    monitor = Scripted(itertools.cycle(["", "", WHO]), busy=[WHO])
    code, records, out, err, written = measure(tmp_path, monitor)
    (done,) = records[CaseDone]
    assert code == 0
    assert len(done.disturbed) == pytest.approx((done.rounds + len(done.disturbed)) / 3, abs=1)
    assert {(r.reason, r.counted) for r in done.disturbed} == {(WHO, False)}
    assert all(r.seconds for r in done.disturbed)
    left_out = {(r.block, r.round) for r in done.disturbed}
    for cell in records[Cell]:
        assert (cell.status, cell.reason) == ("ok", "")
        assert not left_out & set(zip(cell.samples.block, cell.samples.round, strict=True))
    assert f"{len(done.disturbed)} of {done.rounds + len(done.disturbed)} rounds, left out" in out
    assert WHO in out
    assert done.conditions[0]["frequency_mhz"]["median"] == 2400
    assert len(monitor.sampled) == 3, "each entry and the rerun, by case and name"
    assert f"note: {WHO}\n" in err
    assert (written["run"]["disturbed"], written["run"]["busy"]) == ("prefer", [WHO])
    # Verdicts can be made again from the samples that count.
    again = redo([*records[Cell], *records[Verdict]])
    assert [v.about for v, _ in again] == ["A/A", "baseline", "runner-up"]
    for verdict, compared in again:
        kept = (verdict.ratio, verdict.low, verdict.high, verdict.verdict)
        assert kept == (compared.ratio, compared.low, compared.high, compared.verdict)


OFTEN = [WHO, WHO, ""]


def test_a_machine_that_is_never_quiet_is_measured_all_the_same(tmp_path):
    code, records, out, *_ = measure(tmp_path, Scripted(itertools.cycle(OFTEN)))
    (done,) = records[CaseDone]
    assert code == 0
    assert {(r.reason, r.counted, *r.seconds) for r in done.disturbed} == {(WHO, True)}, "cells have times"
    assert len(done.disturbed) >= done.rounds / 2
    for cell in records[Cell]:
        assert (cell.status, cell.reason) == ("ok", "disturbed")
        assert cell.low_us < cell.time_us < cell.high_us
        assert 6 <= len(cell.samples.seconds) <= done.rounds
    assert len(records[Verdict]) == 3
    assert "counted all the same" in out


def test_a_machine_too_disturbed_gives_no_number_where_that_is_refused(tmp_path):
    code, records, out, _, written = measure(tmp_path, Scripted(itertools.cycle(OFTEN)), disturbed="refuse")
    (done,) = records[CaseDone]
    assert (code, done.stopped, records[Verdict]) == (1, "disturbed", [])
    assert written["run"]["disturbed"] == "refuse"
    assert "until most rounds had been disturbed" in out
    for cell in records[Cell]:
        assert (cell.status, cell.time_us) == ("error", None)
        assert cell.reason.startswith("too disturbed to measure, ")
        assert WHO in cell.reason
        assert cell.reason.endswith("(without --disturbed refuse they count)")


def test_a_device_for_one_process_alone_is_refused(tmp_path):
    with pytest.raises(NothingRan, match=r"^cpu cannot be measured: it is in exclusive mode$"):
        measure(tmp_path, Scripted([], blocked="it is in exclusive mode"))
