"""`compare`: two recorded runs, made up so that what changed is known."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_benchmark

from harness.cli.recorded import session
from harness.report.comparison_table import comparison_markdown, since
from harness.results.comparison import compare_runs, spreads, total_speedups
from harness.results.earlier import changed_since
from harness.results.journal import Journal
from harness.results.read import read
from harness.results.schema import CaseDone, Cell, DeviceUsed, PlannedCase, Samples, Verdict
from tests.support.calibrated import calibrations
from tests.support.command_line import error_line
from tests.support.written_runs import a_cell, a_run, altered

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
    noises: tuple[float, ...] = (0.001,),
    calibrated: dict[str, float] | None = None,
    **settings,
) -> Path:
    """A run whose machine is `drift` times as slow as another's, some implementations so much faster.

    devices: of its cases; calibrated: what each device took then; noises: of each case's groups"""
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
        reruns = [
            Verdict(
                case=plan.key, a="torch.sdpa (again)", b="torch.sdpa", ratio=1.0, low=1 - half, high=1 + half,
                noise=0.0, verdict="same", confidence=0.95, about="A/A",
            )
            for half in noises
        ]  # fmt: skip
        done = CaseDone(
            case=plan.key, device=device, measured_s=1.0, setup_s=1.0, rounds=40, blocks=8, stopped="tight",
            conditions=[{"sm_clock_mhz": {"median": median}} for median in (1000.0, clock, 2100.0)],
        )  # fmt: skip
        journal.append([*records, *reruns, done])
    return folder


def cell(plan: PlannedCase, name: str, seconds: list[float], source: str) -> Cell:
    typical = sorted(seconds)[len(seconds) // 2] * 1e6
    return a_cell(
        case=plan.key, impl=name, arch="x86-amx", cache="serving", weight=plan.weight, version="1",
        source=source, time_us=typical, low_us=typical * 0.995, high_us=typical * 1.005,
        samples=Samples(block=[i // 5 for i in range(40)], round=[i % 5 for i in range(40)], seconds=seconds),
    )  # fmt: skip


CHANGED_SOURCE = {"triton.x": "new"}
TWO = {"n1/x": 100.0, "n2/y": 106.0}  # what two devices took for a case when they were calibrated
SLOWER = {"faster": {"triton.x": 1 / 1.08}, "sources": CHANGED_SOURCE, "seed": 1}
"""One row is 8 % slower. That is above the noise between sessions, but not above the spread of TWO."""
ONE, OTHER, APART = ({"devices": names} for names in (("n1/x", "n1/x"), ("n2/y", "n2/y"), ("n1/x", "n2/y")))
UNCALIBRATED = {"devices": ("n3/z", "n3/z"), "calibrated": {"n3/z": 100.0, "n4/u": 100.0}}
PARTLY_NAMED = {"devices": ("n1/x", ""), "machine": {"uuid": "GPU-1"}}

REPORTS: dict[str, tuple[dict, dict]] = {
    "a session 1.3 times as slow": ({}, {"drift": 1.3, "seed": 1}),
    "a planted regression": ({}, SLOWER | {"drift": 0.9}),
    "unchanged rows moved as far": (
        {}, {"faster": {"vllm.vec": 1.2, "triton.x": 1 / 1.1}, "sources": CHANGED_SOURCE, "seed": 1},
    ),
    "a baseline that changed is no baseline": (
        {}, {"faster": {"torch.sdpa": 2.0}, "sources": {"torch.sdpa": "new"}, "seed": 1},
    ),
    "what B lacks": (
        {}, {"faster": {"vllm.vec": 0.8}, "sources": {"vllm.vec": "new"}, "without": "vllm.amx", "seed": 1},
    ),
    "one device measured both": (ONE, ONE | SLOWER | {"calibrated": TWO}),
    "another device measured the second case": (ONE, APART | SLOWER | {"calibrated": TWO}),
    "calibrated in A": (ONE | {"calibrated": TWO}, OTHER | {"seed": 1}),
    "calibrated in A, and a slower device": (ONE | {"calibrated": TWO}, OTHER | {"seed": 1, "drift": 1.3}),
    "calibrated in both, the wider counts": (
        ONE | {"calibrated": TWO}, OTHER | {"seed": 1, "calibrated": {"n1/x": 100.0, "n2/y": 112.0}},
    ),
    "no run calibrated both devices": (ONE | {"calibrated": TWO}, UNCALIBRATED | SLOWER),
    "a device without a name is not known to be another": (APART | {"calibrated": TWO}, SLOWER),
    "another host of the same GPU": (
        {"machine": {"uuid": "GPU-1", "host": "one"}}, SLOWER | {"machine": {"uuid": "GPU-1", "host": "two"}},
    ),
    "another GPU of the same host": (
        {"machine": {"uuid": "GPU-1", "host": "one"}}, SLOWER | {"machine": {"uuid": "GPU-2", "host": "one"}},
    ),
    # Resumed on one machine: the GPU that its provenance names is the first that the cluster had.
    "of a cluster's run": (PARTLY_NAMED, {"machine": {"uuid": "GPU-2"}}),
}  # fmt: skip


def test_a_line_says_what_changed_since_the_last_run_of_the_op_on_this_machine(tmp_path, monkeypatch):
    """A later run, one of another machine, broken and odd ones and one of other terms are not the last."""
    monkeypatch.setattr("harness.paths.ROOT", tmp_path)
    days = iter(range(10, 30))

    def on_a_day(place: str, **facts: Any) -> Path:
        return record(tmp_path / "results" / place, created=f"2026-11-{next(days)}T09:05:00Z", **facts)

    on_a_day("local/oldest", faster={"vllm.vec": 3.0})
    on_a_day("a-machine/last")
    on_a_day("local/other", machine={"device": "another CPU"})
    on_a_day("local/cold", cache="cold")
    (on_a_day("local/broken") / "cells.jsonl").write_text("?\n")
    for name in ("machine", "git", "versions"):
        odd = {"machine": MACHINE, "git": {}, "versions": {}} | {name: None}
        altered(on_a_day(f"local/no {name}"), provenance=odd)
    lines = on_a_day("local/unequal") / "cells.jsonl"
    lines.write_text(lines.read_text().replace('"block":[0,', '"block":['))
    (tmp_path / "results/local/empty").mkdir()
    (tmp_path / "results/local/empty/run.json").write_text("[]")
    now = on_a_day("local/now", **SLOWER)
    same = on_a_day("local/same", seed=3)
    found = changed_since(now, tmp_path / "results")
    assert found and since(*found) == (
        "since 2026-11-11 09:05 (results/a-machine/last): triton.x 1.08x slower in 2 of 2 cases; "
        "no other row changed beyond the noise between sessions (3 %)"
    )
    then, nothing = changed_since(same, tmp_path / "results")
    assert then.folder == now, "the newest"
    unchanged = [row for row in nothing.rows if row.name != "triton.x"]
    assert since(then, replace(nothing, rows=unchanged)).endswith(
        ": nothing changed beyond the noise between sessions (3 %)"
    )
    assert changed_since(tmp_path / "results/local/oldest", tmp_path / "results") is None


def test_what_has_no_time_now_and_a_slower_machine_are_no_silence(tmp_path):
    """A row that is wrong now is not `nothing changed`, nor is a baseline that takes twice as long."""
    then, now = (
        read(str(record(tmp_path / name, **given))) for name, given in (("a", {}), ("b", {"drift": 2}))
    )
    lost = now.cells[CASES[0], "triton.x"]
    now.cells[CASES[0], "triton.x"] = lost.model_copy(update={"status": "wrong", "time_us": None})
    found = compare_runs(then, now)
    assert found.lost == {(CASES[0], "triton.x"): "wrong"}
    assert since(then, found).partition("a): ")[2] == (
        "triton.x: no time now (wrong) in 1 case; the baseline itself took 2x as long (other clocks or load)"
        "; no other row changed beyond the noise between sessions (3 %)"
    )
    conclusion = comparison_markdown(then, now, found).splitlines()[-1]
    assert conclusion == (
        f"1 regressed: triton.x at {CASES[0]} (wrong); "
        "the baseline itself took 2x as long (other clocks or load)"
    )


def test_the_rows_of_all_cases_are_summed_by_their_times(tmp_path):
    """A case of 10 ms that takes 10 % longer outweighs one of 10 us that takes half."""
    (row, *_) = both(tmp_path, {}, SLOWER).rows[1:]
    light, long = (
        replace(row, weight=w, a_us=us, comparison=replace(row.comparison, ratio=ratio))
        for w, us, ratio in ((0.9, 10.0, 2.0), (0.1, 10000.0, 1 / 1.1))
    )
    assert total_speedups([light, long]) == {row.name: pytest.approx(1009 / 1104.5)}
    unweighed = [replace(of, weight=0.0) for of in (light, long)]
    assert total_speedups(unweighed) == {row.name: pytest.approx(10010 / 11005)}


def test_reports_are_as_committed(here, tmp_path, snapshot, monkeypatch):
    texts = []
    for name, (a, b) in REPORTS.items():
        for run, given in (("a", a), ("b", b)):
            record(tmp_path / name / run, **given)
        monkeypatch.chdir(tmp_path / name)  # lines are as long wherever tests write
        done = here("compare", "a", "b", "--markdown", tmp_path / "report.md")
        assert done.stderr == ""
        texts.append(f"=== {name}\n{done.stdout}[{done.returncode}]\n")
    markdown = (tmp_path / "report.md").read_text()
    assert here("compare", "a", "b", "--markdown", "-").stdout == markdown, "and no table beside it"
    texts.append(f"=== the last one as Markdown\n{markdown}")
    snapshot(Path(__file__).parent / "snapshots" / "compared.txt", "\n".join(texts))


def both(tmp_path: Path, a: dict, b: dict):
    runs = [read(str(record(tmp_path / name, **given))) for name, given in (("a", a), ("b", b))]
    return compare_runs(*runs)


def test_what_moved_is_known_to_the_programs_that_ask(tmp_path):
    """The reports above are for people; --json and pages read these."""
    found = both(tmp_path, ONE, SLOWER)
    assert [row.name for row in found.regressions] == ["triton.x"] * 2
    assert total_speedups(found.rows)["triton.x"] == pytest.approx(1 / 1.08, rel=0.01)
    assert found.noise == pytest.approx(0.03), "unchanged rows moved by less than the least noise"
    assert {row.spread for row in found.rows} == {0.0} and not any(row.drift for row in found.rows)
    (spread,) = spreads(calibrations(TWO))
    told = both(tmp_path / "other", ONE, OTHER | {"calibrated": TWO})
    assert {row.spread for row in told.rows} == {spread.max_difference} and spread.max_difference > 0.06
    noisy = {"noises": (0.3, 0.001)}
    for of, (a, b) in {"A": (noisy, SLOWER), "B": ({}, SLOWER | noisy)}.items():
        assert not both(tmp_path / of, a, b).regressions, f"the widest noise of {of}'s groups is more"


@pytest.mark.parametrize(("other", "reason"), [
    ({"machine": {"device": "another"}}, "device differs: a CPU and another"),
    ({"machine": {"threads": 4}}, "threads differs: 2 and 4"),
    ({"machine": {"driver": "580"}}, "driver differs: unknown and 580"),
    ({"cache": "warm"}, "cache differs: serving and warm"),
    ({"settings": {"plain": {}, "A=1": {"A": "1"}}}, "settings differs: plain and plain; A=1"),
    *(({"clock": clock}, f"sm_clock_mhz differs: 2000 and {clock:.0f}") for clock in (1800.0, 2100.0)),
])  # fmt: skip
def test_unlike_runs_are_refused_with_the_reason(tmp_path, other, reason):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", **other)
    assert compare_runs(read(str(a)), read(str(b))).incompatible == [reason]


def test_runs_that_cannot_be_compared_are_when_forced(here, tmp_path):
    a, other = record(tmp_path / "a"), record(tmp_path / "c", machine={"device": "another"})
    of_seed = altered(record(tmp_path / "b"), seed=1)
    assert compare_runs(read(str(a)), read(str(of_seed))).incompatible == ["seed differs: 0 and 1"]
    assert here("compare", a, a).returncode == 0
    done = here("compare", a, record(tmp_path / "d", sources=dict.fromkeys(TIMES, "new")))
    assert ("nothing can be judged" in done.stdout, done.returncode) == (True, 3)
    assert "--force marks it" in error_line(here("compare", a, other))
    altered(other, suite="another")
    _, notes = here("compare", a, other, "--force").stdout.split("NOT COMPARABLE, device differs")
    assert "suite differs" in notes, "which comes after"


def test_runs_without_common_cells_are_one_short_line(here, tmp_path, monkeypatch):
    a = record(tmp_path / "a")
    monkeypatch.setattr(sys.modules[__name__], "TIMES", {f"own.{i}": 1e-4 for i in range(200)})
    line = error_line(here("compare", a, record(tmp_path / "b")), 3)
    assert line == (
        "no cell has a time in both runs: 10 cells in A, 400 cells in B; torch.sdpa at mla_decode batch=1 "
        "ctx=5 core: not in B; own.199 at mla_decode batch=2 ctx=5 core: not in A"
    )


def test_export_is_read_by_pytest_benchmark(here, tmp_path, snapshot):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", drift=1.1, seed=1)
    for run in (a, b):
        assert here("export", run).returncode == 0
    tool = Path(sys.executable).parent / "pytest-benchmark"
    command = [tool, "compare", a / "benchmark.json", b / "benchmark.json", "--group-by=param"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "vllm.amx[mla_decode batch=2 ctx=5 core]" in done.stdout
    stored = read(str(a))
    made = session(stored.run, [stored.cells[CASES[0], "torch.sdpa"]])
    stats = made["benchmarks"][0].pop("stats")
    assert stats["data"] == stored.cells[CASES[0], "torch.sdpa"].samples.seconds
    assert (stats["rounds"], made.pop("version")) == (40, pytest_benchmark.__version__)
    snapshot(Path(__file__).parent / "snapshots" / "benchmark.json", json.dumps(made, indent=1) + "\n")
    empty = record(tmp_path / "c")
    (empty / "cells.jsonl").write_text("")
    assert "holds no time" in error_line(here("export", empty), 3)
