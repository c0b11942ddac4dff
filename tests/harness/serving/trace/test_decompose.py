"""Traces made by hand, whose sums are known."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.serving.clients.files import UnreadableError
from harness.serving.trace import Trace, decompose
from tests.support.command_line import error_line
from tests.support.paths import SERVING_DATA
from tests.support.traces import (
    ARGMAX,
    FLASH,
    MLA,
    MM,
    NORM,
    RAGGED,
    REDUCE,
    Event,
    kernel,
    launch,
    op,
    span,
    write,
)

COMMUNICATING = (REDUCE, "void deep_ep::intranode::combine<x>(x)")
NAMES = (MM, NORM, MLA, "my_own_kernel", *COMMUNICATING)


def of(folder: Path, events: list[Event], **head: object) -> Trace:
    return decompose(write(folder, events, **head))


@pytest.mark.parametrize(("events", "classes", "busy_us", "idle_us"), [
    # One stream: all is exposed, its gaps are idle.
    ([kernel(MM, 100, 10), kernel(NORM, 115, 5), kernel(MM, 120, 20)],
     {"bf16_gemm": (2, 30.0, 30.0), "norm": (1, 5.0, 5.0)}, 35, 5),
    # Kernels that compute at once share the time.
    ([kernel(MM, 0, 10), kernel(NORM, 5, 10, stream=8)],
     {"bf16_gemm": (1, 10.0, 7.5), "norm": (1, 10.0, 7.5)}, 15, 0),
    # Idle begins when the last of all streams ends.
    ([kernel(MM, 0, 20), kernel(NORM, 5, 3, stream=8), kernel(MM, 30, 5)],
     {"bf16_gemm": (2, 25.0, 23.5), "norm": (1, 3.0, 1.5)}, 25, 10),
    ([{**kernel("Memset (Device)", 0, 2), "cat": "gpu_memset"},
      {**kernel("Memcpy DtoD (Device -> Device)", 2, 3), "cat": "gpu_memcpy"}],
     {"copy": (2, 5.0, 5.0)}, 5, 0),
    ([kernel("my_own_kernel", 0, 8), kernel(MM, 8, 2)],
     {"unknown": (1, 8.0, 8.0), "bf16_gemm": (1, 2.0, 2.0)}, 10, 0),
])  # fmt: skip
def test_times_and_what_of_them_is_exposed(tmp_path: Path, events, classes, busy_us, idle_us) -> None:
    trace = of(tmp_path, events)
    assert {c: (t.calls, t.time_us, t.exposed_us) for c, t in trace.by_class().items()} == classes
    (device,) = trace.devices
    assert (device.busy_ns, device.idle_ns) == (1000 * busy_us, 1000 * idle_us)
    assert trace.shares() == {c: time / sum(t for _, t, _ in classes.values())
                              for c, (_, time, _) in classes.items()}  # fmt: skip
    assert [unknown.name for unknown in trace.unknown()] == ["my_own_kernel"] * ("unknown" in classes)


def test_communication_under_computation_is_not_exposed(tmp_path: Path) -> None:
    events = [kernel(MM, 0, 10), kernel(REDUCE, 4, 10, stream=8), kernel(NORM, 12, 1)]
    trace = of(tmp_path, events)
    found = trace.by_class()
    assert found["all_reduce"].time_us == 10
    assert found["all_reduce"].exposed_us == pytest.approx(3)  # 10 to 12 and 13 to 14
    assert found["bf16_gemm"].exposed_us == pytest.approx(10)
    assert trace.exposure()["all_reduce"] == pytest.approx(0.3)
    (device,) = trace.devices
    assert (device.communication_ns, device.exposed_communication_ns) == (10000, 3000)
    assert {row.op_class: row.alone_ns for row in trace.classes} == {
        "bf16_gemm": 4000, "all_reduce": 3000, "norm": 0,
    }  # fmt: skip


def test_ranks_merged_into_one_file_are_told_apart_or_said(tmp_path: Path) -> None:
    """Both ranks' kernels are of device 0, and their launches have the same ids."""
    events = [
        launch(1, 0), {**launch(1, 0), "pid": 10}, {**kernel(MM, 5, 5, correlation=1), "pid": "rank0"},
        {**kernel(MM, 5, 5, correlation=1), "pid": "rank1"},
    ]  # fmt: skip
    trace = of(tmp_path, events)
    assert [(device.name, device.busy_ns) for device in trace.devices] == [("rank0", 5000), ("rank1", 5000)]
    assert [finding.rule for finding in trace.findings] == ["merged"]


def test_steps_are_told_by_who_launched_what_not_by_when_it_ran(tmp_path: Path) -> None:
    """Launches run ahead of the device; what is sampled after the annotated call is of its step."""
    prefill, decode = "execute_context_1(128)_generation_0(0)", "execute_context_0(0)_generation_1(1)"
    events = [
        span(prefill, 0, 10), launch(1, 1), launch(2, 12), span(decode, 20, 10), launch(3, 20),
        kernel(MM, 30, 40, correlation=1), kernel(ARGMAX, 70, 5, correlation=2),
        kernel(MM, 80, 7, correlation=3), kernel(NORM, 90, 3),
    ]  # fmt: skip
    trace = of(tmp_path, events)
    assert [(s.phase, s.time_ns, s.span_ns, s.period_ns) for s in trace.steps] == [
        ("prefill", 45000, 45000, 50000),
        ("decode", 7000, 7000, None),
    ]
    assert trace.by_class("prefill").keys() == {"bf16_gemm", "sampling"}
    assert trace.by_class("other").keys() == {"norm"}, "without a launch it is of no step"
    assert any(finding.rule == "no launch" for finding in trace.findings)
    assert all("vLLM" in step.evidence for step in trace.steps)


def test_a_step_that_the_profiler_cut_is_noted(tmp_path: Path) -> None:
    events = []
    for i in range(9):
        events += [span("step[DECODE bs=1]", 100 * i, 90)]
        for j in range(1 if i == 0 else 4):
            events += [launch(10 * i + j, 100 * i + j),
                       kernel(MM, 100 * i + 10 * j, 5, correlation=10 * i + j)]  # fmt: skip
    (finding,) = of(tmp_path, events).findings
    assert (finding.severity, finding.rule) == ("note", "cut step")
    assert "1 of 9 decode steps" in finding.message


def test_engines_annotations_go_before_torchs(tmp_path: Path) -> None:
    events = [span("ProfilerStep#1", 0, 100), span("step[EXTEND bs=1 toks=9]", 5, 20),
              span("step[DECODE bs=1]", 40, 20), launch(1, 10), launch(2, 45),
              kernel(MM, 10, 4, correlation=1), kernel(MM, 45, 4, correlation=2)]  # fmt: skip
    assert [step.phase for step in of(tmp_path, events).steps] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("attention", "phase"),
    [([MLA], "decode"), ([RAGGED], "prefill"), ([MLA, RAGGED], "mixed"), ([FLASH], "other"), ([], "other")],
)
def test_without_an_engines_annotation_attention_tells(
    tmp_path: Path, attention: list[str], phase: str
) -> None:
    events = [span("ProfilerStep#1", 0, 100), launch(1, 5), kernel(MM, 10, 1, correlation=1)]
    for i, name in enumerate(attention, 2):
        events += [launch(i, 5 + i), kernel(name, 10 * i, 1, correlation=i)]
    (step,) = of(tmp_path, events).steps
    assert step.phase == phase


def test_attention_for_both_in_a_graph_is_decode(tmp_path: Path) -> None:
    events = [launch(1, 0, name="cudaGraphLaunch"), kernel(FLASH, 5, 5, correlation=1), launch(2, 1),
              kernel(ARGMAX, 11, 1, correlation=2), launch(3, 2, name="cudaGraphLaunch"),
              kernel(NORM, 20, 1, correlation=3), kernel(FLASH, 21, 5, correlation=3)]  # fmt: skip
    trace = of(tmp_path, events)
    assert [step.phase for step in trace.steps] == ["decode", "decode"], "sampling ends a step"
    assert trace.by_class("decode")["mha_decode"].calls == 2
    assert "graph" in trace.steps[0].evidence


def test_shapes_are_those_of_the_operator_around_the_launch(tmp_path: Path) -> None:
    events = [
        op("aten::linear", 0, 20, dims=[[4, 9]]), op("aten::mm", 5, 10, dims=[[4, 9], [9, 2]]), launch(1, 7),
        kernel(MM, 30, 6, correlation=1), op("aten::bmm", 40, 5, dims=[[2, 4, 4]]), launch(2, 41),
        kernel(MM, 50, 3, correlation=2), op("aten::mm", 60, 5, external=77, dims=[[8, 8], [8, 8]]),
        {**kernel(MM, 70, 2), "args": {"device": 0, "stream": 7, "External id": 77}},
        launch(3, 30), kernel(NORM, 80, 1, correlation=3),
    ]  # fmt: skip
    by_class = {kernel.op_class: kernel for kernel in of(tmp_path, events).kernels}
    assert (by_class["norm"].op, by_class["norm"].shapes) == ("", ()), "no operator runs when it is launched"
    assert [(s.dims, s.calls) for s in by_class["bf16_gemm"].shapes] == [
        ("[[4, 9], [9, 2]]", 1), ("[[8, 8], [8, 8]]", 1),
    ]  # fmt: skip
    assert by_class["absorbed_bmm"].op == "aten::bmm"


def test_a_graphs_kernels_have_no_operator(tmp_path: Path) -> None:
    events = [op("aten::bmm", 0, 20, dims=[[1]]), launch(1, 7, name="hipGraphLaunch"),
              kernel(MM, 30, 6, correlation=1)]  # fmt: skip
    (found,) = of(tmp_path, events).kernels
    assert (found.op_class, found.op, found.shapes) == ("bf16_gemm", "", ())


def test_operators_count_without_those_inside_where_there_are_no_kernels(tmp_path: Path) -> None:
    events = [
        op("aten::linear", 0, 10), op("aten::mm", 2, 5), op("aten::copy_", 3, 1), op("aten::mm", 8, 1),
        op("aten::add", 20, 4), op("aten::add", 5, 4, tid=2),
    ]  # fmt: skip
    trace = of(tmp_path, events)
    assert trace.on == "cpu"
    assert {c: (t.calls, t.time_us) for c, t in trace.by_class().items()} == {
        "bf16_gemm": (3, 9.0), "copy": (1, 1.0), "elementwise": (2, 8.0),
    }  # fmt: skip
    assert {k.name: k.time_us for k in trace.kernels}["aten::linear"] == 4.0
    (device,) = trace.devices
    assert (device.streams, device.busy_ns, device.idle_ns) == (2, 14000, 10000)


@pytest.mark.parametrize("turned", [False, True])
def test_of_operators_that_begin_at_once_the_longer_is_outside(tmp_path: Path, turned: bool) -> None:
    events = [op("aten::linear", 0, 10), op("aten::mm", 0, 4), op("aten::copy_", 0, 1)]
    trace = of(tmp_path, events[::-1] if turned else events)
    assert {k.name: k.time_us for k in trace.kernels} == {"aten::linear": 6, "aten::mm": 3, "aten::copy_": 1}


def test_per_step_has_medians_and_host_the_idle_time(tmp_path: Path) -> None:
    events = [launch(6, -40), launch(7, -39), kernel(NORM, -30, 4, correlation=6),
              kernel(NORM, -20, 4, correlation=7)]  # fmt: skip
    for i in range(3):
        at = 100 * i
        events += [span("step[DECODE bs=1]", at, 90), launch(2 * i, at + 1), launch(2 * i + 1, at + 2),
                   kernel(MM, at + 5, 10 + i, correlation=2 * i),
                   kernel(NORM, at + 30, 4, correlation=2 * i + 1)]  # fmt: skip
    trace = of(tmp_path, events)
    found = trace.per_step("bf16_gemm", "decode")
    assert found and (found.steps, found.calls, found.time_us, found.each_time_us) == (3, 1, 11, (10, 11, 12))
    host = trace.per_step("host", "decode")
    assert host and host.each_time_us == (15, 14, 13)
    assert trace.devices[0].idle_between_ns == 1000 * (6 + 21 + 71 + 71)
    assert trace.per_step("bf16_gemm", "prefill") is None
    for step in trace.steps:
        exposed = sum(step.times(c).exposed_ns for c in {*step.classes, "host"})
        assert exposed == pytest.approx(step.span_ns)


intervals = st.tuples(
    st.sampled_from(NAMES), st.integers(0, 400), st.integers(0, 60), st.integers(0, 3), st.integers(0, 1)
)


@settings(max_examples=40)
@given(st.lists(intervals, min_size=1, max_size=30))
def test_sums_hold_for_any_trace(tmp_path_factory: pytest.TempPathFactory, found: list) -> None:
    events = [kernel(n, t / 4, d / 4, stream=s, device=v) for n, t, d, s, v in found]
    trace = of(tmp_path_factory.mktemp("any"), events)
    total = sum(int(d * 250) for _, _, d, _, _ in found)
    assert trace.time_ns() == total == sum(kernel.time_ns for kernel in trace.kernels)
    assert total == sum(t.time_ns for t in trace.by_class().values()) == sum(d.sum_ns for d in trace.devices)
    assert len(found) == sum(kernel.calls for kernel in trace.kernels)
    for device in trace.devices:
        assert device.busy_ns <= min(device.sum_ns, device.span_ns)
        assert device.exposed_communication_ns <= device.communication_ns <= device.busy_ns
        mine = [e for e in events if str(e["pid"]) == device.name]
        computing = [e for e in mine if e["name"] not in COMMUNICATING]
        assert device.busy_ns == _covered(mine)
        assert device.exposed_communication_ns == _covered(mine) - _covered(computing)
    busy = sum(device.busy_ns for device in trace.devices)
    assert sum(row.exposed_ns for row in trace.classes) == pytest.approx(busy)
    for row in trace.classes:
        assert row.alone_ns <= row.exposed_ns + 1e-3
        assert row.exposed_ns <= row.time_ns + 1e-3


def _covered(events: list[Event]) -> int:
    quarters = {q for e in events for q in range(int(e["ts"] * 4), int((e["ts"] + e["dur"]) * 4))}
    return 250 * len(quarters)


nested = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 80)), min_size=1, max_size=25
)


@settings(max_examples=40)
@given(nested)
def test_operators_own_times_cover_each_thread_once(tmp_path_factory, found: list) -> None:
    events = [op("aten::mm", start / 4, length / 4, tid=tid) for tid, start, length in found]
    trace = of(tmp_path_factory.mktemp("any"), events)
    covered = sum(_covered([e for e in events if e["tid"] == tid]) for tid in range(3))
    assert trace.time_ns() == covered
    assert sum(kernel.calls for kernel in trace.kernels) == len(found)


# Published and recorded traces (tests/data/serving/traces/README.md), and rocprofv3's formats


FOLDER = SERVING_DATA / "traces"
FILES = sorted(path.name for path in FOLDER.glob("*.gz"))

Here = Callable[..., subprocess.CompletedProcess]


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
