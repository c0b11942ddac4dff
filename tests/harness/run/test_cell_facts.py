"""Facts of an entry besides its times, in its cell and in the table; the environment of a run."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kernels
from harness.catalogue.devices import Ceilings
from harness.machine.monitor.base import Blind
from harness.paths import ROOT
from harness.plan.entry import Entry, own_choice
from harness.plan.memory import Rotation
from harness.plan.settings import Setting
from harness.progress import Progress
from harness.report.case_table import case_table
from harness.report.terminal import plain_text
from harness.results.schema import CaseDone, Cell
from harness.run.case import CaseMeasurer
from harness.run.cells import Group, build_cells, build_records
from harness.run.checks import CaseChecks
from harness.run.device import OwnDevice
from harness.timing.rounds import Round, Rounds, measure
from harness.workers.environment import provenance
from harness.workers.process import WorkerFailure
from kernels.platform import Platform
from shapes.case import Case
from tests.support.written_runs import a_run

GPU = Platform("cuda", "sm_90", "cuda:0", "a GPU")

CASE = kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 5})


def entry_of_case(name: str = "torch.naive", **facts: Any) -> Entry:
    (impl,) = [i for i in kernels.implementations(CASE.op) if i.name == name]
    return Entry(impl.name, impl, Setting(), "graph", **facts)


def shown(entry: Entry, rounds: int = 2, case: Case = CASE, device: Platform = GPU) -> tuple[Cell, str]:
    """The cell of an entry with so many blocks of one round each, and its table."""
    made = Rounds([Round(block, 0, {entry.name: 0.01}) for block in range(rounds)])
    measured = Group(case, [entry], Rotation("warm", 1, 0, 0, False), made)
    cells, _ = build_cells(measured, device, a_run())
    cell = cells[entry.name]
    done = CaseDone(case=case.key, measured_s=1, setup_s=1, rounds=2, blocks=2, stopped="tight")
    return cell, plain_text(case_table([cell, done]))


FACTS = (
    *({}, {"check": {"ok": True, "calls": 19}}, {"check": {"ok": True, "calls": 20}}),
    *({"check": {"ok": True, "far": True}}, {"check": {"ok": True, "far": False}}),
    *({"host_s": [3e-6, 5e-6, 900e-6]}, {"picked": "tuned: ck splitK=2"}, {"synchronises": True}),
)


def test_tables_with_facts_of_an_entry_are_as_committed(snapshot):
    text = "".join(f"=== {facts}\n{shown(entry_of_case(**facts))[1]}\n\n" for facts in FACTS)
    snapshot(Path(__file__).parent / "snapshots" / "told.txt", text)


def test_records_of_a_case_in_groups_are_as_committed(monkeypatch, snapshot):
    facts = {"kernels": [{"name": "sum", "us": 0.5}], "host_s": [3e-6, 4e-6], "ran": ["a hash"]}
    facts |= {"setup_s": 1.5, "pinned": [0, 2], "source": "code", "check": {"ok": True, "calls": 30}}
    base = entry_of_case("torch.sdpa", **facts)
    rerun = replace(base, name="torch.sdpa (again)")
    parts = []
    triton = entry_of_case("triton.split_kv", config={"warps": 4})
    beaten = entry_of_case("torch.compile", beaten="beaten in the eliminations: 2x")
    for row, time, blocks in ((entry_of_case(), 1.5, 2), (triton, 0.5, 3), (beaten, 2.0, 2)):
        made = [
            Round(block, i, {name: seconds * (1 + 0.01 * i) for name, seconds in times.items()}, how)
            for times in [{base.name: 1e-3, rerun.name: 1.01e-3, row.name: time * 1e-3}]
            for block in range(blocks)
            for i, how in enumerate(("", "noise" if block else ""))
        ]
        made[-1] = replace(made[-1], took={base.name: 2.0}, use="left out")
        made.append(replace(made[0], block=blocks, use="elimination"))
        rounds = Rounds(made, stopped="tight")
        facts = {"setup_s": 3.0, "phases": {"preparing": time}, "conditions": {"samples": 1}}
        parts.append(Group(CASE, [base, row], Rotation("cold", 2, 9, 5, True), rounds, base, rerun, **facts))
    peak = Ceilings({"bf16": 1e12}, read=1e8)
    monkeypatch.setattr("harness.run.cells.peaks", lambda _: replace(peak, read=4e10))
    run = a_run(ceilings=asdict(peak), confidence=0.9, margin=0.02)
    records, done = build_records(CASE, parts, GPU, run)
    text = json.dumps([record.model_dump(exclude={"version"}) for record in (*records, done)])
    shorter = json.loads(text, parse_float=lambda number: float(f"{float(number):.6g}"))
    lines = "".join(f"{json.dumps(record)}\n" for record in shorter)
    snapshot(Path(__file__).parent / "snapshots" / "records.jsonl", lines)


MI350X = Platform("rocm", "gfx950", "cuda:0", "AMD Instinct MI350X")

SPLITS = (
    "; known: ROCm/aiter#4350, NaN in about half of the calls that split a sequence in 16 (seen at 95abba475)"
)


@pytest.mark.parametrize(("status", "name", "known"), [
    *((status, "aiter.asm", SPLITS) for status in ("wrong", "crashed", "timeout")),
    *((status, "aiter.asm", "") for status in ("error", "unsupported")),
    ("wrong", "aiter.triton", ""),
])  # fmt: skip
def test_the_reason_of_a_failure_names_known_defects_of_the_library(status, name, known):
    entry = entry_of_case(name)
    entry.fail(status, "why it failed")
    case = kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 5, "heads": 16, "kv": "fp8"})
    cell, table = shown(entry, 0, case, MI350X)
    assert cell.reason == f"why it failed{known}"
    assert cell.reason in " ".join(table.split())


def test_a_run_shows_a_row_that_is_refused_for_a_defect(monkeypatch, tmp_path):
    monkeypatch.setattr("kernels.platform.version", lambda module: "0.1.20")
    monkeypatch.setattr("kernels.platform.lookalike", lambda module: "")
    monkeypatch.setattr("kernels.platform.torch_build", lambda: "rocm")
    op = kernels.OPS["mla_decode"]
    case = op.case({"batch": 4, "ctx": 100, "heads": 64, "kv": "fp8", "fp8": "e4m3fnuz"})
    place = Platform("rocm", "gfx942", "cuda:0", "AMD Instinct MI300X", memory=1 << 37)
    impls = [i for i in kernels.implementations(case.op) if i.name == "aiter.asm_persistent"]
    settings = [Setting(), Setting(is_rerun=True)]
    plan = SimpleNamespace(op=op, implementations=impls, settings=settings, configs_of=own_choice)
    plan.record, plan.ceilings = a_run(launches=["graph"], cache="warm"), None
    measurer = CaseMeasurer(plan, OwnDevice(place, Blind("")), progress=None)
    cell, done = measurer.measure(case, 1, 1, tmp_path)
    assert (cell.status, cell.time_us) == ("unsupported", None)
    assert cell.reason.startswith("known: ROCm/aiter#4957, GPU fault")
    assert "known: ROCm/aiter#4957, GPU fault" in plain_text(case_table([cell, done]))


def test_files_of_the_checkout_are_recorded_by_their_place_in_it(monkeypatch):
    monkeypatch.setenv("KERNEL_BENCH_PLUGINS", f"{ROOT}/tools/control_kernels.py:/elsewhere/mine.py")
    environment = provenance(GPU, 2)["environment"]
    assert environment["KERNEL_BENCH_PLUGINS"] == "tools/control_kernels.py:mine.py"


def rounds_of(entry: Entry, scratch: Path, host_seconds: float | None, dies=False) -> list[str]:
    """The requests of rounds to a worker that answers every sample alike, or `dies` at the first request."""
    asked: list[str] = []

    def ask(entry: Entry, request: str, **arguments: float) -> dict[str, object]:
        asked.append(request)
        if dies:
            raise WorkerFailure("crashed", "it is gone")
        return {"seconds": 0.01, "calls": 5, "host_seconds": host_seconds}

    worker = SimpleNamespace(platform=GPU, worker=None, ask=ask, fresh=lambda rotation: None)
    worker.living = worker.entries = [entry]
    worker.pause, worker.prepare = lambda: asked.append("pause"), lambda row: asked.append("prepare")
    checks = CaseChecks(case=CASE, workers=[worker], say=print)
    record = SimpleNamespace(margin=0.01, seed=0, baseline="torch.naive")
    plan = SimpleNamespace(disturbed="prefer", record=record, make_rounds=measure)
    measurer = CaseMeasurer(plan, OwnDevice(GPU, Blind("a test")), Progress(quiet=True))
    group = Group(CASE, [entry], Rotation("warm", 1, 0, 0, False))
    measurer._time(checks, group, 1.0, 1.0)
    return asked


@pytest.mark.parametrize("host_seconds", [5e-6, None])
def test_each_sample_has_its_host_time_and_its_worker_is_paused_before_and_after(tmp_path, host_seconds):
    entry = entry_of_case()
    asked = rounds_of(entry, tmp_path, host_seconds)
    samples = asked.count("sample")
    assert asked[asked.index("compare_last") - 1] == asked[asked.index("sample") + 1] == "pause"
    # Half of the samples are the rerun's.
    assert entry.host_s == ([host_seconds] * (samples // 2) if host_seconds else [])
    assert samples


def test_an_entry_that_fails_before_its_sample_has_none(tmp_path):
    """The new process of its worker is made ready for the rerun, and paused."""
    entry = entry_of_case()
    asked = rounds_of(entry, tmp_path, None, dies=True)
    assert entry.status == "crashed"
    assert "sample" not in asked
    assert asked[asked.index("compare_last") + 1 :][:2] == ["prepare", "pause"]  # of the rerun
