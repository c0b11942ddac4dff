"""What a worker tells of a contender beside its times, in its cell and in the table; and what a run says of
its environment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import kernels
from harness.machine.monitor.base import Blind
from harness.paths import ROOT
from harness.plan.arms import Arm
from harness.plan.contender import Contender, default_entries
from harness.plan.rotation import Rotation
from harness.report.case_table import case_table
from harness.report.terminal import plain
from harness.results.schema import CaseDone
from harness.run.case import CaseRun, Measured
from harness.run.cells import Yardsticks, build_cells
from harness.run.device import OwnDevice
from harness.run.measurer import CaseMeasurer
from harness.timing.rounds import Round, Rounds
from harness.workers.environment import provenance
from harness.workers.process import WorkerFailure
from kernels.platform import Platform

GPU = Platform("cuda", "sm_90", "cuda:0", "a GPU")


def told(**facts):
    """The cell and the table of a contender whose worker told these facts."""
    case = kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 5})
    (impl,) = [i for i in kernels.implementations(case.op) if i.name == "torch.naive"]
    contender = Contender(impl.name, impl, Arm(), "graph", **facts)
    rounds = Rounds([Round(block, 0, {impl.name: 0.01}) for block in range(2)])
    measured = Measured(case, [contender], Rotation("warm", 1, 0, 0, False), rounds)
    (cell,), _ = build_cells(measured, GPU, Yardsticks(None, None, 0.95))
    done = CaseDone(case=case.key, measured_s=1, setup_s=1, rounds=2, blocks=2, stopped="tight")
    return cell, plain(case_table([cell, done]))


@pytest.mark.parametrize(("calls", "note"), [(19, "only 19 calls compared"), (20, "")])
def test_a_row_of_which_few_calls_were_compared_says_so(calls, note):
    cell, table = told(check={"ok": True, "calls": calls})
    assert (cell.status, cell.reason) == ("ok", note)
    assert ("calls compared" in table) is bool(note)


@pytest.mark.parametrize("far", [True, False])
def test_a_library_that_counts_in_32_bits_keeps_its_time_with_a_note(far):
    cell, table = told(check={"ok": True, "far": far})
    assert (cell.status, "2^32" in cell.reason, "2^32" in table) == ("ok", not far, not far)


MI350X = Platform("rocm", "gfx950", "cuda:0", "AMD Instinct MI350X")


def failed(status: str, name: str) -> str:
    """The reason in the cell of an implementation that ended so on an MI350X; the table has it too."""
    case = kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 5, "heads": 16, "kv": "fp8"})
    (impl,) = [i for i in kernels.implementations(case.op) if i.name == name]
    contender = Contender(name, impl, Arm(), "graph")
    contender.fail(status, "why it failed")
    measured = Measured(case, [contender], Rotation("warm", 1, 0, 0, False))
    (cell,), _ = build_cells(measured, MI350X, Yardsticks(None, None, 0.95))
    done = CaseDone(case=case.key, measured_s=1, setup_s=1, rounds=2, blocks=2, stopped="tight")
    table = " ".join(plain(case_table([cell, done])).split())
    assert cell.reason in table
    return cell.reason


@pytest.mark.parametrize("status", ["wrong", "crashed", "timeout"])
def test_what_failed_is_told_with_the_known_defects_of_its_library(status):
    known = "known: ROCm/aiter#4350, NaN in about half of the calls that split a sequence in 16"
    assert failed(status, "aiter.asm") == f"why it failed; {known} (seen at 95abba475)"
    assert failed(status, "aiter.triton") == "why it failed"


@pytest.mark.parametrize("status", ["error", "unsupported"])
def test_what_did_not_run_is_not_blamed_on_them(status):
    assert failed(status, "aiter.asm") == "why it failed"


def test_a_run_shows_what_is_refused_for_a_defect(monkeypatch, tmp_path):
    monkeypatch.setattr("kernels.platform.version", lambda module: "0.1.20")
    monkeypatch.setattr("kernels.platform.lookalike", lambda module: "")
    monkeypatch.setattr("kernels.platform.torch_build", lambda: "rocm")
    op = kernels.OPS["mla_decode"]
    case = op.case({"batch": 4, "ctx": 100, "heads": 64, "kv": "fp8", "fp8": "e4m3fnuz"})
    place = Platform("rocm", "gfx942", "cuda:0", "AMD Instinct MI300X", memory=1 << 37)
    (impl,) = [i for i in kernels.implementations(case.op) if i.name == "aiter.asm_persistent"]
    plan = SimpleNamespace(
        op=op,
        implementations=[impl],
        arms=[Arm()],
        entries=default_entries,
        yardsticks=lambda platform: Yardsticks(None, None, 0.95),
        record=SimpleNamespace(
            launches=["graph"], contrast="implementations", baseline="torch.sdpa", cache="warm"
        ),
    )
    measurer = CaseMeasurer(plan, OwnDevice(place, Blind("")), progress=None)
    cell, done = measurer.measure(case, 1, 1, tmp_path)
    assert (cell.status, cell.time_us) == ("unsupported", None)
    assert cell.reason.startswith("known: ROCm/aiter#4957, GPU fault")
    assert "known: ROCm/aiter#4957, GPU fault" in plain(case_table([cell, done]))


def test_host_time_is_the_median_turn_in_microseconds_and_has_a_column():
    cell, table = told(host_s=[3e-6, 5e-6, 900e-6])
    assert cell.host_us == pytest.approx(5.0)
    assert " host " in table
    assert " 5 us " in table


def test_without_host_time_there_is_no_column():
    cell, table = told()
    assert cell.host_us is None
    assert " host " not in table


def test_who_waits_for_the_device_and_what_was_picked_are_noted():
    cell, table = told(synchronises=True, picked="tuned: ck splitK=2")
    assert (cell.synchronises, cell.picked) == (True, "tuned: ck splitK=2")
    assert "torch.naive: tuned: ck splitK=2" in table
    assert "torch.naive: waits for the device: its time holds the host's" in table


def test_kernels_are_kept_with_their_own_times():
    cell, _ = told(kernels=[{"name": "gemm", "us": 7.5, "count": 1}, {"name": "sum", "us": 0.5, "count": 2}])
    assert (cell.kernels, cell.kernel_us) == (["gemm", "sum"], [7.5, 0.5])


def test_pinning_is_kept():
    assert told(pinned=[0, 2])[0].pinned == [0, 2]


def test_files_of_the_checkout_are_recorded_by_their_place_in_it(monkeypatch):
    monkeypatch.setenv("KERNEL_BENCH_PLUGINS", f"{ROOT}/tools/control_kernels.py:/elsewhere/mine.py")
    found = provenance(GPU, 2)["environment"]["KERNEL_BENCH_PLUGINS"]
    assert found == "tools/control_kernels.py:mine.py"


class Told:
    """A station whose worker answers every turn alike."""

    def __init__(self, contender: Contender, host_seconds: float | None) -> None:
        self.living = self.contenders = [contender]
        self.host_seconds = host_seconds
        self.platform = GPU
        self.worker = None

    def pause(self) -> None:
        pass

    def fresh(self, rotation: Rotation) -> None:
        pass

    def prepare(self, contender: Contender) -> None:
        pass

    def ask(self, contender: Contender, request: str, **arguments: float):
        if request == "spoil":
            return None
        return {"seconds": 0.01, "calls": 5, "host_seconds": self.host_seconds}


CASE = kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 5})


def contending() -> Contender:
    (impl,) = [i for i in kernels.implementations(CASE.op) if i.name == "torch.naive"]
    return Contender(impl.name, impl, Arm(), "graph")


def measured_by(station: Told, scratch: Path) -> Measured:
    run = CaseRun(
        case=CASE, stations=[station], start_judge=None, monitor=Blind("a test"), scratch=scratch, say=print
    )
    measured = Measured(CASE, station.contenders, Rotation("warm", 1, 0, 0, False))
    run._measure(measured, 1.0, 1.0, "torch.naive")
    return measured


@pytest.mark.parametrize("host_seconds", [5e-6, None])
def test_every_turn_tells_its_host_time(tmp_path, host_seconds):
    contender = contending()
    measured = measured_by(Told(contender, host_seconds), tmp_path)
    assert measured.rounds.rounds
    told = [host_seconds] * len(measured.rounds.rounds)
    assert contender.host_s == (told if host_seconds else [])


class Fails(Told):
    """Its worker dies as outputs are spoiled."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender, None)
        self.asked: list[str] = []

    def pause(self) -> None:
        self.asked.append("pause")

    def prepare(self, contender: Contender) -> None:
        self.asked.append("prepare")

    def ask(self, contender: Contender, request: str, **arguments: float):
        self.asked.append(request)
        raise WorkerFailure("crashed", "it is gone")


def test_who_fails_before_a_turn_has_none(tmp_path):
    """Its worker's replacement, made ready for whoever shared it, waits then as others do."""
    contender = contending()
    station = Fails(contender)
    measured_by(station, tmp_path)
    assert contender.status == "crashed"
    assert "turn" not in station.asked
    after_first = station.asked[station.asked.index("spoil") + 1 :]
    assert after_first[:2] == ["prepare", "pause"]  # of the twin
