"""What a worker tells of a contender beside its times, in its cell and in the table; and what a run says of
its environment."""

from __future__ import annotations

import pytest

import kernels
from harness.machine.monitor.base import Blind
from harness.paths import ROOT
from harness.plan.arms import Arm
from harness.plan.contender import Contender
from harness.plan.rotation import Rotation
from harness.report.case_table import case_table
from harness.report.terminal import plain
from harness.results.schema import CaseDone
from harness.run.case import CaseRun, Measured
from harness.run.cells import Yardsticks, build_cells
from harness.timing.rounds import Round, Rounds
from harness.workers.environment import provenance
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
    assert found == "tools/control_kernels.py:/elsewhere/mine.py"


class Told:
    """A station whose worker answers every turn alike."""

    def __init__(self, contender: Contender, host_seconds: float | None) -> None:
        self.living = self.contenders = [contender]
        self.host_seconds = host_seconds

    def fresh(self, rotation: Rotation) -> None:
        pass

    def prepare(self, contender: Contender) -> None:
        pass

    def ask(self, contender: Contender, request: str, **arguments: float):
        return {"seconds": 0.01, "host_seconds": self.host_seconds}


@pytest.mark.parametrize("host_seconds", [5e-6, None])
def test_every_turn_tells_its_host_time(tmp_path, host_seconds):
    case = kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 5})
    (impl,) = [i for i in kernels.implementations(case.op) if i.name == "torch.naive"]
    contender = Contender(impl.name, impl, Arm(), "graph")
    station = Told(contender, host_seconds)
    run = CaseRun(
        case=case, stations=[station], start_judge=None, monitor=Blind("a test"), scratch=tmp_path, say=print
    )
    measured = Measured(case, [contender], Rotation("warm", 1, 0, 0, False))
    run._measure(measured, 1.0, 1.0, impl.name)
    assert measured.rounds.rounds
    told = [host_seconds] * len(measured.rounds.rounds)
    assert contender.host_s == (told if host_seconds else [])
