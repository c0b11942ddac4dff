"""A run on devices one of which is slower: what is recorded and printed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.run_display import RunDisplay
from harness.cluster.execute import run_on
from harness.cluster.orders import Answer
from harness.page.assemble import assemble
from harness.page.inputs import inputs
from harness.results import load
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, Record, Run
from harness.run.request import Request
from shapes.case import Case
from tests.support.simulated_pool import SimulatedPool

CASES = tuple(f"m={m} n=512 k=7168" for m in (16, 32, 64, 128))


class UnequalPool(SimulatedPool):
    """Whatever c measures takes 1.3 times as long."""

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        return [
            replace(a, result=_slower(a.result)) if a.device == "c" else a for a in super().wait(timeout_s)
        ]


def _slower(result: object) -> object:
    if not isinstance(result, list):
        return result
    times = ("time_us", "low_us", "high_us")
    return [
        r.model_copy(update={name: 1.3 * getattr(r, name) for name in times}) if isinstance(r, Cell) else r
        for r in result
    ]


@pytest.fixture
def run_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(devices: str) -> tuple[str, Path]:
        request = Request(
            op="block_scale_gemm", case=CASES, impl="torch.bf16,torch.naive", out=str(tmp_path / "run"),
            budget="10m", boundary="core",
        )  # fmt: skip
        with RunDisplay(request) as display:
            pool = UnequalPool(dict.fromkeys(devices, "cpu"), lambda device, case: 10.0)
            assert run_on(pool, request, lambda platform: request, display) == 0
        return capsys.readouterr().out, tmp_path / "run"

    run.folder = tmp_path / "run"
    return run


def test_the_device_of_each_case_is_noted_and_the_one_that_lags_named(run_with):
    printed, folder = run_with("abc")
    by = {r.case: r.device for records in Journal(folder).finished().values() for r in records
          if isinstance(r, CaseDone)}  # fmt: skip
    assert set(by.values()) == set("abc") and len(by) == len(CASES)
    noted = [line.split() for line in printed.splitlines() if line.startswith("device ")]
    assert sorted(noted) == sorted(["device", device] for device in by.values())
    lines = printed.splitlines()
    assert any(
        line.startswith("3 devices of type cpu lie apart: the slowest takes 1.300x (1.2") for line in lines
    )
    (lags,) = [line for line in lines if " lags: " in line]
    assert lags.startswith("c lags: 1.300x")
    table = load(folder)
    assert set(zip(table["case"], table["device"], table["host"], strict=True)) == {
        (case, device, device) for case, device in by.items()
    }


def test_a_kill_after_a_device_s_first_case_leaves_its_calibration(run_with, monkeypatch):
    seen: list[tuple[set[str], list[tuple[str, str]]]] = []

    def look(display: RunDisplay, run: Run, case: Case, records: Sequence[Record]) -> None:
        journal = Journal(folder)
        made = [(c.device, c.when) for c in journal.calibrations()]
        seen.append(({device.name for device in journal.devices()}, made))

    folder = run_with.folder
    monkeypatch.setattr(RunDisplay, "case", look)
    run_with("abc")
    assert len(seen[0][0]) == 1 and len(seen[-1][0]) == 3
    for devices, made in seen:
        assert sorted(made) == [(device, "first") for device in sorted(devices)]
    made = [(c.device, c.when) for c in Journal(folder).calibrations()]
    assert sorted(made) == [(device, when) for device in "abc" for when in ("first", "last")]


def test_one_device_alone_is_not_spoken_of(run_with):
    printed, folder = run_with("a")
    assert not any(line.startswith("device") or "devices" in line for line in printed.splitlines())
    assert [device.name for device in Journal(folder).devices()] == ["a"]
    page = assemble(inputs([str(folder)]))
    assert not [chart for chart in page.charts() if chart.title == "Devices"]
    assert "device" not in {label for case in page.sections[0].sections for label, _ in case.notes}


def test_the_page_has_the_devices_and_says_that_sizes_are_of_several(run_with):
    _, folder = run_with("abc")
    page = assemble(inputs([str(folder)]))
    (chart,) = [chart for chart in page.charts() if chart.title == "Devices"]
    cells = [[getattr(cell, "text", cell) for cell in row.cells] for row in chart.table.rows]
    assert sorted((row[0], row[4], row[5]) for row in cells) == [
        (device, when, us)
        for device, us in (("a", "1000"), ("b", "1000"), ("c", "1300"))
        for when in ("first", "last")
    ]
    assert sum(int(row[2]) for row in cells) == 2 * len(CASES), "cases measured, in both passes' rows"
    assert {row[8].split()[0] for row in cells if row[0] != "a"} == {"the", "1.300x"}
    time = next(chart for chart in page.charts() if chart.title.startswith("Time over m"))
    assert (
        "3 devices measured its cases; those of their type lie apart: the slowest takes 1.300x"
        in time.reading
    )
    notes = [text for label, text in page.sections[-1].notes if label == "devices"]
    assert len(notes) == 2 and notes[1].startswith("c lags: 1.300x")
    measured_by = [
        text for case in page.sections[0].sections for label, text in case.notes if label == "device"
    ]
    assert len(measured_by) == len(CASES)
