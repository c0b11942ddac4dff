"""A run on devices of which one is slower: what is recorded and printed about them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli.run_display import RunDisplay
from harness.cluster.execute import run_on_cluster
from harness.errors import FAILED, OK
from harness.page.assemble import assemble, inputs
from harness.page.document import PageSection
from harness.results import load
from harness.results.journal import Journal
from harness.results.schema import CaseDone
from harness.run.plan import Request
from tests.support.page_text import page_text
from tests.support.simulated_pool import pool

Takes = Callable[[str, str], float | str]
CASES = tuple(f"m={m} n=512 k=7168" for m in (16, 32, 64, 128))


@pytest.fixture
def run_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(
        devices: str, resume: str = "", takes: Takes = lambda *_: 10.0, code: int = OK
    ) -> tuple[str, Path]:
        request = Request(resume=resume, budget="2h") if resume else Request(
            op="block_scale_gemm", case=CASES, impl="torch.bf16,torch.naive", out=str(tmp_path / "run"),
            budget="10m", boundary="core",
        )  # fmt: skip
        with RunDisplay(request) as display:
            several = pool(devices, takes, slower={"c": 1.3})
            assert run_on_cluster(request, lambda platform: request, display, several) == code
        return capsys.readouterr().out, tmp_path / "run"

    return run


@pytest.mark.parametrize("devices", ["a", "abc"])
def test_of_several_each_case_has_its_device_and_the_one_that_lags_is_named(run_with, snapshot, devices):
    """A single device is not named, neither in the terminal nor on the page."""
    printed, folder = run_with(devices)
    by = {r.case: r.device for records in Journal(folder).finished().values() for r in records
          if isinstance(r, CaseDone)}  # fmt: skip
    assert set(by.values()) == set(devices) and len(by) == len(CASES)
    table = load(folder)
    assert set(zip(table["case"], table["device"], table["host"], strict=True)) == {
        (case, device, device) for case, device in by.items()
    }
    (op, *machines) = assemble(inputs([str(folder)])).sections
    sweeps = [chart for chart in op.charts if chart.title.startswith("Time over m")]
    shown = [chart for section in machines for chart in section.charts if chart.title == "Devices"]
    notes = [note for section in (*op.sections, *machines) for note in section.notes if "device" in note[0]]
    assert bool(shown) == (devices == "abc")
    text = page_text([PageSection("devices", "Devices", charts=[*sweeps, *shown], notes=notes)])
    named = [line for line in printed.splitlines() if line.startswith("device ")]
    text = "\n".join([*named, printed.partition(" --open\n")[2], text])
    snapshot(Path(__file__).parent / "snapshots" / f"devices-{devices}.txt", text)
    if devices == "abc":
        lines = (folder / "cells.jsonl").read_text().splitlines(keepends=True)
        lines = [line for line in lines if '"calibration"' not in line or '"device":"c"' not in line]
        lines = [line for line in lines if f'"case":"{sorted(by)[0]}"' not in line]
        (folder / "cells.jsonl").write_text("".join(lines))
        readings = [chart.reading for chart in assemble(inputs([str(folder)])).sections[0].charts]
        assert any(
            "3 devices measured its cases; those of their type were not comp" in text for text in readings
        )
        printed, _ = run_with("a", str(folder))
        assert "\ndevice " in printed, "of a run that others measured, too, one alone is named"


def test_a_case_that_no_device_measures_is_left_out_and_the_run_has_failed(run_with):
    printed, _ = run_with("ab", takes=lambda _, case: "fails" if " m=32 " in case else 10.0, code=FAILED)
    assert "being spent: 1 case of core" in printed
