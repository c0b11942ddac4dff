"""Published and recorded traces (tests/data/serving/traces/README.md), and rocprofv3's formats."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from harness.serving.clients.files import UnreadableError
from harness.serving.op_classes import OP_CLASSES
from harness.serving.trace import Trace, decompose
from tests.support.command_line import error_line
from tests.support.paths import SERVING_DATA
from tests.support.traces import MM, REDUCE

FOLDER = SERVING_DATA / "traces"
FILES = sorted(path.name for path in FOLDER.glob("*.gz"))

Here = Callable[..., subprocess.CompletedProcess]


@cache
def recorded(name: str) -> Trace:
    return decompose(FOLDER / name)


@pytest.mark.parametrize("name", FILES)
def test_classes_and_kernels_sum_to_the_devices_and_nothing_is_unknown(name: str) -> None:
    trace = recorded(name)
    total = trace.time_ns()
    assert total == sum(device.sum_ns for device in trace.devices)
    assert total == sum(kernel.time_ns for kernel in trace.kernels)
    assert total == sum(trace.time_ns(phase) for phase in trace.phases())
    assert sum(trace.shares().values()) == pytest.approx(1)
    assert set(trace.by_class()) <= set(OP_CLASSES)
    assert not trace.unknown()
    assert all(0 <= w <= 1 for w in trace.exposure().values())
    busy = sum(device.busy_ns for device in trace.devices)
    assert sum(row.exposed_ns for row in trace.classes) == pytest.approx(busy)
    assert not trace.findings


def test_what_is_printed_of_every_trace(here: Here) -> None:
    """After a change that is meant, write what `serving trace` prints of each into traces.txt. What it says
    of them was counted by hand once: 24 layers of an attention and two experts' products in vLLM's graph, 36
    dense ones of four products in SGLang's prefill, 46 % of the training in communication, mostly hidden."""
    shown = "".join(here("serving", "trace", FOLDER / name).stdout for name in FILES)
    assert shown.replace(f"{FOLDER}/", "") == Path(__file__).with_name("traces.txt").read_text()


def dispatch(kernel: object, start: object, end: object) -> dict:
    info = {"agent_id": {"handle": 4}, "queue_id": {"handle": 1}, "kernel_id": kernel}
    return {"start_timestamp": start, "end_timestamp": end, "dispatch_info": info}


def process(pid: int, dispatches: list[dict], symbols: dict[int, str]) -> dict:
    names = [
        {"kernel_id": i, "formatted_kernel_name": name, "kernel_name": "x.kd"} for i, name in symbols.items()
    ]
    agents = [{"id": {"handle": 4}, "type": 2, "name": "gfx942"}]
    records = {"kernel_dispatch": dispatches}
    return {"metadata": {"pid": pid}, "buffer_records": records, "kernel_symbols": names, "agents": agents}


def test_kernel_numbers_are_of_their_process_and_may_come_before_their_names(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    found = [dispatch(3, 100, 150), dispatch(9, 150, 151), dispatch(3, 200, 190)]
    tools = [process(1, found, {3: MM + ".kd"}), process(2, [dispatch(3, 100, 140)], {3: REDUCE})]
    path.write_text(json.dumps({"rocprofiler-sdk-tool": tools}))
    trace = decompose(path)
    assert {c: t.time_ns for c, t in trace.by_class().items()} == {
        "bf16_gemm": 50, "all_reduce": 40, "unknown": 1,
    }  # fmt: skip
    assert len(trace.devices) == 2
    assert {kernel.name for kernel in trace.kernels} == {MM, REDUCE, "kernel_id 9"}
    said = " | ".join(finding.message for finding in trace.findings)
    assert "1 records have no start and end" in said
    assert "1 kernels are not among kernel_symbols" in said


CSV = (
    '"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
    f'"KERNEL_DISPATCH","Agent 4",1,3,"{MM}",1,1000,1500\n'
    f'"KERNEL_DISPATCH","Agent 4",2,4,"{REDUCE} [clone .kd]",2,1400,1600\n'
)


def test_rocprofv3s_kernel_trace_as_csv(tmp_path: Path) -> None:
    path = tmp_path / "1_kernel_trace.csv"
    path.write_text(CSV)
    trace = decompose(path)
    assert {c: t.exposed_ns for c, t in trace.by_class().items()} == {"bf16_gemm": 500, "all_reduce": 100}
    path.write_text(CSV[:-12])
    with pytest.raises(UnreadableError, match="line 3: no kernel with start and end"):
        decompose(path)


def test_the_command_prints_and_writes_all_of_it(here: Here, tmp_path: Path) -> None:
    path = FOLDER / "vllm_cpu_deepseek_v3.json.gz"
    shown = here("serving", "trace", path, "--steps", "--top", "3")
    assert shown.returncode == 0
    for text in ("4 decode steps", "a decode step: median of 4", "mla_decode", "unknown: none", "and 1"):
        assert text in shown.stdout, text
    (host,) = [line for line in shown.stdout.splitlines() if line.startswith("host") and ".." in line]
    assert "us" in host or "ms" in host, "the idle time has a row in the table of a step"
    done = here("serving", "trace", path, "--phase", "decode", "--json", tmp_path / "out.json")
    assert (done.returncode, done.stdout) == (0, "")
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written) == ["trace", "classes", "kernels", "steps", "unknown"]
    assert {row["phase"] for row in (*written["classes"], *written["steps"], *written["kernels"])} == {
        "decode"
    }
    total = sum(row["time_us"] for row in written["classes"])
    assert total == pytest.approx(sum(row["time_us"] for row in written["kernels"]))
    assert sum(row["share"] for row in written["classes"]) == pytest.approx(1)
    assert sum(step["time_us"] for step in written["steps"]) == pytest.approx(total)


def test_a_phase_that_is_not_there_is_said(here: Here) -> None:
    path = FOLDER / "deepseek_v3_training.json.gz"
    assert "has no decode steps; it has: training" in error_line(
        here("serving", "trace", path, "--phase", "decode")
    )
