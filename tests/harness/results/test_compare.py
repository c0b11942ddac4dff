"""`compare`: two recorded runs, made up so that what changed is known."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.results.comparison import UNKNOWN_SPREAD, compared, means
from harness.results.export import session
from harness.results.journal import Journal
from harness.results.recorded import incompatibilities, read
from harness.results.schema import CaseDone, Cell, DeviceUsed, PlannedCase, Samples, Verdict
from harness.results.spread import spreads
from tests.support.calibrated import calibrations
from tests.support.command_line import error_line
from tests.support.written_runs import a_run, altered

CASES = ("mla_decode batch=1 ctx=5 core", "mla_decode batch=2 ctx=5 core")
TIMES = {"torch.sdpa": 100e-6, "torch.naive": 200e-6, "vllm.amx": 50e-6, "vllm.vec": 70e-6, "triton.x": 40e-6}
MACHINE = {"platform": "cpu", "arch": "x86-amx", "device": "a CPU", "threads": 2, "driver": ""}


def record(
    folder: Path,
    *,
    drift: float = 1.0,
    faster: dict[str, float] | None = None,
    sources: dict[str, str] | None = None,
    machine: dict | None = None,
    clock: float = 2000.0,
    without: str = "",
    seed: int = 0,
    devices: tuple[str, str] = ("", ""),
    calibrated: dict[str, float] | None = None,
    **settings,
) -> Path:
    """A run whose machine is `drift` times as slow as another's, some implementations so much faster.

    devices: of its cases; calibrated: what each device took then"""
    draw = random.Random(seed)
    planned = [
        PlannedCase(op="mla_decode", sizes={}, boundary="core", place="", weight=w, key=key)
        for key, w in zip(CASES, (0.75, 0.25), strict=True)
    ]
    provenance = {"machine": MACHINE | (machine or {}), "git": {"commit": "abc"}}
    facts = {"id": folder.name, "implementations": list(TIMES), "provenance": provenance} | settings
    journal = Journal.create(folder, a_run(planned, **facts))
    used = dict.fromkeys(filter(None, (*devices, *(calibrated or {}))))
    if used:
        journal.append(DeviceUsed(name=name, type="H200", host=name.partition("/")[0]) for name in used)
        journal.append(calibrations(calibrated or {}))
    for plan, device in zip(planned, devices, strict=True):
        shared = [draw.gauss(1, 0.05) for _ in range(40)]
        records = []
        for name, base in TIMES.items():
            us = base * drift / (faster or {}).get(name, 1)
            seconds = [s * draw.gauss(1, 0.003) * us for s in shared]
            if name != without:
                records.append(cell(plan, name, seconds, (sources or {}).get(name, "same")))
        floor = Verdict(
            case=plan.key, a="torch.sdpa (again)", b="torch.sdpa", ratio=1.0, low=0.999, high=1.001,
            floor=0.0, verdict="same", confidence=0.95, about="A/A",
        )  # fmt: skip
        done = CaseDone(
            case=plan.key, device=device, measured_s=1.0, setup_s=1.0, rounds=40, blocks=8, stopped="tight",
            conditions=[{"sm_clock_mhz": {"min": clock, "median": clock, "max": clock}}],
        )  # fmt: skip
        journal.append([*records, floor, done])
    return folder


def cell(plan: PlannedCase, name: str, seconds: list[float], source: str) -> Cell:
    typical = sorted(seconds)[len(seconds) // 2] * 1e6
    return Cell(
        op=plan.op, case=plan.key, boundary="core", impl=name, platform="cpu", arch="x86-amx", arm="plain",
        launch="eager", cache="serving", status="ok", time_us=typical, low_us=typical * 0.995,
        high_us=typical * 1.005, weight=plan.weight, version="1", source=source,
        samples=Samples(block=[i // 5 for i in range(40)], round=[i % 5 for i in range(40)], seconds=seconds),
    )  # fmt: skip


def compare(a: Path, b: Path):
    return compared(read(str(a)), read(str(b)))


def rows(a: Path, b: Path):
    return {(row.case, row.name): row for row in compare(a, b).rows}


def test_a_slower_session_is_no_regression(tmp_path):
    """All rows take 1.3 times as long: that is the machine, and is said to be."""
    found = compare(record(tmp_path / "a"), record(tmp_path / "b", drift=1.3, seed=1))
    assert not found.regressions
    assert {row.comparison.verdict for row in found.rows if row.anchor} == {"same"}
    assert all(row.drift for row in found.rows)


def test_a_planted_regression_is_found_unless_unchanged_rows_moved_as_far(tmp_path):
    a, new = record(tmp_path / "a"), {"triton.x": "new"}
    b = record(tmp_path / "b", drift=0.9, faster={"triton.x": 1 / 1.08}, sources=new, seed=1)
    found = compare(a, b)
    assert [row.name for row in found.regressions] == ["triton.x"] * 2
    assert means(found.rows)["triton.x"] == pytest.approx(1 / 1.08, rel=0.01)
    assert found.floor == pytest.approx(0.03), "unchanged rows moved by less than the least floor"

    c = record(tmp_path / "c", faster={"vllm.vec": 1.2, "triton.x": 1 / 1.1}, sources=new, seed=1)
    found = compare(a, c)
    assert found.floor == pytest.approx(0.2, abs=0.02)
    assert not found.regressions, "10 % is within what rows without a change moved by"
    assert {row.name for row in found.rows if row.drift} == {"vllm.vec"}


def test_a_baseline_that_changed_is_no_anchor(tmp_path):
    a = record(tmp_path / "a")
    b = record(tmp_path / "b", faster={"torch.sdpa": 2.0}, sources={"torch.sdpa": "new"}, seed=1)
    found = rows(a, b)
    assert {row.anchor for row in found.values()} - {""} == {"torch.naive"}
    assert found[CASES[0], "torch.sdpa"].comparison.verdict == "faster"
    assert found[CASES[0], "vllm.amx"].comparison.verdict == "same"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"machine": {"device": "another"}}, "device differs: a CPU and another"),
        ({"machine": {"threads": 4}}, "threads differs: 2 and 4"),
        ({"machine": {"driver": "580"}}, "driver differs: unknown and 580"),
        ({"cache": "warm"}, "cache differs: serving and warm"),
        ({"arms": {"plain": {}, "A=1": {"A": "1"}}}, "arms differs: plain and plain; A=1"),
        ({"clock": 1800.0}, "sm_clock_mhz differs: 2000 and 1800"),
    ],
)
def test_unlike_runs_are_refused_with_the_reason(tmp_path, other, reason):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", **other)
    assert incompatibilities(read(str(a)), read(str(b))) == [reason]


def test_runs_of_another_seed_are_refused(tmp_path):
    a, b = record(tmp_path / "a"), altered(record(tmp_path / "b"), seed=1)
    assert incompatibilities(read(str(a)), read(str(b))) == ["seed differs: 0 and 1"]


TWO = {"n1/x": 100.0, "n2/y": 106.0}
OURS = {"faster": {"triton.x": 1 / 1.08}, "sources": {"triton.x": "new"}, "seed": 1}
"""8 % slower, which is told where one device measured both."""


def regressed(a: Path, b: Path) -> set[str]:
    return {row.case for row in compare(a, b).regressions}


def test_the_spread_of_the_devices_is_added_to_the_floor_of_what_another_measured(tmp_path):
    """The second case was measured on another device, which takes 6 % longer: 8 % more are within that and
    the floor between sessions."""
    a = record(tmp_path / "a", devices=("n1/x", "n1/x"))
    b = record(tmp_path / "b", devices=("n1/x", "n2/y"), calibrated=TWO, **OURS)
    found = compare(a, b)
    (spread,) = spreads(calibrations(TWO))
    assert {row.case for row in found.regressions} == {CASES[0]}
    assert {row.spread for row in found.rows if row.case == CASES[0]} == {0.0}
    assert {row.spread for row in found.rows if row.case == CASES[1]} == {spread.most}
    assert spread.most > 0.06
    assert regressed(a, record(tmp_path / "c", devices=("n1/x", "n1/x"), calibrated=TWO, **OURS)) == set(
        CASES
    )


@pytest.mark.parametrize("where", ["a", "b"])
def test_either_run_s_calibrations_count(tmp_path, where):
    runs = [
        record(tmp_path / name, devices=(device,) * 2, calibrated=TWO if name == where else None)
        for name, device in (("a", "n1/x"), ("b", "n2/y"))
    ]
    (spread,) = spreads(calibrations(TWO))
    found = compare(*runs)
    assert {row.spread for row in found.rows} == {spread.most}
    assert found.notes == [
        f"device differs: n1/x and n2/y at {CASES[0]} and 1 more of the cases",
        f"the floor of 2 cases has {spread.most:.1%} more: what devices of type H200 may differ by, "
        f"calibrated in {tmp_path / where}",
    ]


def test_of_devices_that_no_run_calibrated_together_a_spread_is_assumed(tmp_path):
    a = record(tmp_path / "a", devices=("n1/x", "n1/x"), calibrated=TWO)
    b = record(tmp_path / "b", devices=("n3/z", "n3/z"), calibrated={"n3/z": 100.0, "n4/u": 100.0}, **OURS)
    found = compare(a, b)
    assert {row.spread for row in found.rows} == {UNKNOWN_SPREAD}
    assert not found.regressions
    assert found.notes[-1].endswith("8.0% more: assumed, as no run calibrated both devices")


def test_machines_whose_drivers_name_the_device_are_known_apart(tmp_path):
    """The host of a container is called otherwise each time, its GPU is not."""
    a = record(tmp_path / "a", machine={"uuid": "GPU-1", "host": "one"})
    same = record(tmp_path / "b", machine={"uuid": "GPU-1", "host": "two"}, **OURS)
    other = record(tmp_path / "c", machine={"uuid": "GPU-2", "host": "one"}, **OURS)
    assert regressed(a, same) == set(CASES)
    assert regressed(a, other) == set()
    assert {row.spread for row in rows(a, other).values()} == {UNKNOWN_SPREAD}
    assert incompatibilities(read(str(a)), read(str(other))) == []


def test_what_a_cluster_s_run_measured_without_a_name_is_on_no_known_device(tmp_path):
    """Resumed on one machine: the GPU that its provenance names is the first that the cluster had."""
    a = record(tmp_path / "a", devices=("n1/x", ""), machine={"uuid": "GPU-1"})
    b = record(tmp_path / "b", machine={"uuid": "GPU-2"})
    assert list(read(str(a)).devices) == [CASES[0]]
    assert {row.case for row in rows(a, b).values() if row.spread} == {CASES[0]}


def test_the_table_says_what_another_device_measured(here, tmp_path):
    a = record(tmp_path / "a", devices=("n1/x", "n1/x"))
    b = record(tmp_path / "b", devices=("n1/x", "n2/y"), drift=1.2, calibrated=TWO, seed=1)
    printed = here("compare", a, b, "--markdown", tmp_path / "report.md").stdout
    assert f"device differs: n1/x and n2/y at {CASES[1]}\n" in printed
    (spread,) = spreads(calibrations(TWO))
    table = (tmp_path / "report.md").read_text()
    first, second = table.split(CASES[1] + "  (")
    said = f"another device: floor {spread.most:.1%} higher"
    assert second.count(said) == len(TIMES) and said not in first
    assert "machine drift" in first and "machine drift" not in second


def test_the_command(here, tmp_path):
    a = record(tmp_path / "a")
    slow = record(
        tmp_path / "b", faster={"vllm.vec": 0.8}, sources={"vllm.vec": "new"}, without="vllm.amx", seed=1
    )
    done = here("compare", a, slow, "--markdown", tmp_path / "report.md")
    assert done.returncode == 1
    assert "2 regressed: vllm.vec at mla_decode batch=1" in done.stdout
    assert "vllm.amx at mla_decode batch=1 ctx=5 core: not in B" in done.stdout
    assert re.search(r"- vllm.vec: B is 0\.(79|80)\dx as fast as A", done.stdout)
    assert "| implementation" in (tmp_path / "report.md").read_text()
    assert here("compare", a, a).returncode == 0
    other = record(tmp_path / "c", machine={"device": "another"})
    assert "--force marks it" in error_line(here("compare", a, other))
    assert "NOT COMPARABLE, device differs" in here("compare", a, other, "--force").stdout


def test_export_is_read_by_pytest_benchmark(here, tmp_path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", drift=1.1, seed=1)
    for run in (a, b):
        assert here("export", run).returncode == 0
    tool = Path(sys.executable).parent / "pytest-benchmark"
    command = [tool, "compare", a / "benchmark.json", b / "benchmark.json", "--group-by=param"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "vllm.amx[mla_decode batch=2 ctx=5 core]" in done.stdout
    stored = read(str(a))
    (first, *_) = session(stored.run, list(stored.cells.values()))["benchmarks"]
    assert first["stats"]["data"] == stored.cells[CASES[0], "torch.sdpa"].samples.seconds
    assert first["stats"]["rounds"] == 40
    empty = record(tmp_path / "c")
    (empty / "cells.jsonl").write_text("")
    assert "holds no time" in error_line(here("export", empty), 3)
