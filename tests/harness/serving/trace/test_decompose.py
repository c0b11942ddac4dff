"""Traces made by hand, whose sums are known; recorded ones and rocprofv3's formats; what the command says."""

import random
from pathlib import Path

import pytest

from tests.support.command_line import error_line
from tests.support.paths import SERVING_DATA
from tests.support.traces import MM, NORM, REDUCE, decode_steps, kernel, launch, of, op, span, sums

MLA = "void flash_fwd_splitkv_mla_kernel<x>(x)"
FLASH = "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x>>>(x)"
RAGGED = "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<x>(x)"
ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>"
FOLDER = SERVING_DATA / "traces"
MADE = FOLDER / "made"
COMMUNICATING = (REDUCE, "void deep_ep::intranode::combine<x>(x)")


@pytest.mark.parametrize(("events", "classes", "busy_us", "idle_us"), [
    # One stream: all is exposed, its gaps are idle.
    ([kernel(MM, 100, 10), kernel(NORM, 115, 5), kernel(MM, 120, 20)],
     {"bf16_gemm": (2, 30.0, 30.0), "norm": (1, 5.0, 5.0)}, 35, 5),
    # Kernels that compute at once share the time; idle begins when the last of all streams ends.
    ([kernel(MM, 0, 20), kernel(NORM, 5, 3, stream=8), kernel(MM, 30, 5)],
     {"bf16_gemm": (2, 25.0, 23.5), "norm": (1, 3.0, 1.5)}, 25, 10),
    # Communication has what no computation covers: 10 to 12 and 13 to 14.
    ([kernel(MM, 0, 10), kernel(REDUCE, 4, 10, stream=8), kernel(NORM, 12, 1)],
     {"bf16_gemm": (1, 10.0, 10.0), "all_reduce": (1, 10.0, 3.0), "norm": (1, 1.0, 1.0)}, 14, 0),
    ([{**kernel("Memset (Device)", 0, 2), "cat": "gpu_memset"},
      {**kernel("Memcpy DtoD (Device -> Device)", 2, 3), "cat": "gpu_memcpy"}],
     {"copy": (2, 5.0, 5.0)}, 5, 0),
    ([kernel("my_own_kernel", 0, 8), kernel(MM, 8, 2)],
     {"unknown": (1, 8.0, 8.0), "bf16_gemm": (1, 2.0, 2.0)}, 10, 0),
])  # fmt: skip
def test_times_and_what_of_them_is_exposed(tmp_path, events, classes, busy_us, idle_us):
    trace = of(tmp_path, events)
    assert sums(trace, exposed=True) == classes
    [device] = trace.devices
    assert (device.busy_ns, device.idle_ns) == (1000 * busy_us, 1000 * idle_us)
    total = sum(time for _, time, _ in classes.values())
    assert trace.time_ns() == 1000 * total
    if "all_reduce" in classes:
        assert (device.communication_ns, device.exposed_communication_ns) == (10000, 3000)


# Steps and their phases


def test_steps_are_told_by_who_launched_what_not_by_when_it_ran(tmp_path):
    """Launches run ahead of the device; what is sampled after the annotated call is of its step."""
    prefill, decode = "execute_context_1(128)_generation_0(0)", "execute_context_0(0)_generation_1(1)"
    events = [
        span(decode, 0, 2), span(prefill, 0, 10), span(decode, 5, 2),  # one inside another is the same step
        launch(1, 1), launch(2, 12), span(decode, 20, 10), launch(3, 20),
        kernel(MM, 30, 40, correlation=1), kernel(ARGMAX, 70, 5, correlation=2),
        kernel(MM, 80, 7, correlation=3), kernel(NORM, 90, 3), op("aten::mm", 0, 40),
        {**span(decode, 200, 5), "pid": 10}, {**launch(4, 50), "pid": 10}, kernel(NORM, 95, 3, correlation=4),
    ]  # fmt: skip
    trace = of(tmp_path, events)
    assert [(s.phase, s.time_ns, s.span_ns, s.period_ns) for s in trace.steps] == [
        ("prefill", 45000, 45000, 50000),
        ("decode", 7000, 7000, None),
    ]
    assert trace.by_class("prefill").keys() == {"bf16_gemm", "sampling"}
    assert trace.by_class("other").keys() == {"norm"}, "before the first step, or not launched"
    assert [finding.rule for finding in trace.findings] == ["no launch"]
    assert all("vLLM" in step.evidence for step in trace.steps)


def test_a_step_that_the_profiler_cut_is_noted(tmp_path):
    events = [span("step[DECODE bs=1]", 100 * i, 90) for i in range(9)]
    for i in range(9):
        for call in range(10 * i, 10 * i + (1 if i == 0 else 4)):
            events += [launch(call, 10 * call), kernel(MM, 10 * call, 5, correlation=call)]
    [finding] = of(tmp_path, events).findings
    assert (finding.severity, finding.rule) == ("note", "cut step")
    assert "1 of 9 decode steps" in finding.message


@pytest.mark.parametrize(("attention", "phase"), [
    ([MLA], "decode"), ([RAGGED], "prefill"), ([MLA, RAGGED], "mixed"), ([FLASH], "other"), ([], "other"),
])  # fmt: skip
def test_without_an_engines_annotation_attention_tells(tmp_path, attention, phase):
    events = [span("ProfilerStep#1", 0, 100), launch(1, 5), kernel(MM, 10, 1, correlation=1)]
    for i, name in enumerate(attention, 2):
        events += [launch(i, 5 + i), kernel(name, 10 * i, 1, correlation=i)]
    [step] = of(tmp_path, events).steps
    assert step.phase == phase
    old = [op("ProfilerStep#1", 0, 100), *events[1:]]  # as torch before 2022 has its steps
    assert [(step.name, step.phase) for step in of(tmp_path, old).steps] == [("ProfilerStep#1", phase)]
    with_engine = [*events, span("step[EXTEND bs=1 toks=9]", 1, 3), span("step[DECODE bs=1]", 4, 9)]
    assert [step.phase for step in of(tmp_path, with_engine).steps] == ["decode"], "an engine's go first"


def test_attention_for_both_in_a_graph_is_decode(tmp_path):
    events = [kernel(ARGMAX, 1, 1), kernel(MM, 1, 1, device=1), launch(1, 0, name="cudaGraphLaunch"),
              kernel(FLASH, 5, 5, correlation=1), launch(2, 1),
              kernel(ARGMAX, 11, 1, correlation=2), launch(3, 2, name="cudaGraphLaunch"),
              kernel(NORM, 20, 1, correlation=3), kernel(FLASH, 21, 5, correlation=3)]  # fmt: skip
    trace = of(tmp_path, events)
    assert [step.phase for step in trace.steps] == ["decode", "decode", "other"], "sampling ends a step"
    assert trace.by_class("decode")["mha_decode"].calls == 2
    assert "graph" in trace.steps[0].evidence


def test_idle_time_within_a_step_is_its_own_whatever_ended_before_it(tmp_path):
    events = [
        span("step[DECODE bs=1]", 0, 9), launch(1, 1), span("step[DECODE bs=1]", 10, 9), launch(2, 11),
        launch(3, 12), kernel(MM, 20, 20, correlation=1), kernel(NORM, 25, 1, stream=8, correlation=2),
        kernel(MM, 45, 5, correlation=3),
    ]  # fmt: skip
    trace = of(tmp_path, events)
    assert [(s.span_ns, s.idle_ns) for s in trace.steps] == [(20000, 0), (25000, 5000)]
    assert trace.devices[0].idle_between_steps_ns == 0


def test_per_step_has_medians_and_host_the_idle_time(tmp_path):
    events = [launch(6, -40), launch(7, -39), kernel(NORM, -30, 4, correlation=6),
              kernel(NORM, -20, 4, correlation=7)]  # fmt: skip
    for i in range(3):
        at = 100 * i
        events += [span("step[DECODE bs=1]", at, 90), launch(2 * i, at + 1), launch(2 * i + 1, at + 2),
                   kernel(MM, at + 5, 10 + i, correlation=2 * i),
                   kernel(NORM, at + 30, 4, correlation=2 * i + 1)]  # fmt: skip
    events += [launch(9, 203), kernel(MM, 220, 0, correlation=9)]
    trace = of(tmp_path, events)
    found, host = trace.per_step("bf16_gemm", "decode"), trace.per_step("host", "decode")
    assert (found.steps, found.calls, found.time_ns, found.least_and_most) == (3, 1, 11e3, (10e3, 12e3))
    assert (host.calls, host.time_ns, host.least_and_most) == (0, 14e3, (13e3, 15e3))
    assert trace.devices[0].idle_between_steps_ns == 1000 * (6 + 21 + 71 + 71)
    assert trace.per_step("bf16_gemm", "prefill") is None
    for step in trace.steps:
        exposed = sum(step.times(c).exposed_ns for c in {*step.classes, "host"})
        assert exposed == pytest.approx(step.span_ns)


# Operators, around launches and on their own


def test_shapes_are_those_of_the_operator_around_the_launch(tmp_path):
    events = [
        op("aten::linear", 0, 20, dims=[[4, 9]]), op("aten::mm", 5, 10, dims=[[4, 9], [9, 2]]), launch(1, 7),
        kernel(MM, 30, 6, correlation="1"), op("aten::bmm", 40, 5, dims=[[2, 4, 4]]), launch(2, 41),
        kernel(MM, 50, 3, correlation=2), op("aten::addmm", 60, 5, external=77, dims=[[8, 8], [8, 8]]),
        {**kernel(MM, 70, 2), "args": {"device": 0, "stream": 7, "External id": 77}},
        launch(3, 30), kernel(NORM, 80, 1, correlation=3),
        {**launch(5, 43), "tid": 3}, kernel(NORM, 81, 1, correlation=5),
        op("aten::bmm", 90, 20, dims=[[1]]), launch(4, 97, name="hipGraphLaunch"),
        kernel(REDUCE, 99, 1, correlation=4),
    ]  # fmt: skip
    found = {kernel.op_class: kernel for kernel in of(tmp_path, events).kernels}
    assert (found["norm"].op, found["norm"].shapes) == ("", {}), "launched outside of operators"
    assert (found["all_reduce"].op, found["all_reduce"].shapes) == ("", {}), "a graph's have none"
    assert [(dims, times.calls) for dims, times in found["bf16_gemm"].shapes.items()] == [
        ("[[4, 9], [9, 2]]", 1), ("[[8, 8], [8, 8]]", 1),
    ]  # fmt: skip
    assert found["bf16_gemm"].op == "aten::mm", "of the most time"
    assert found["absorbed_bmm"].op == "aten::bmm"


@pytest.mark.parametrize("turned", [False, True])
def test_operators_count_without_those_inside_where_there_are_no_kernels(tmp_path, turned):
    events = [
        op("aten::linear", 0, 10), op("aten::mm", 0, 5), op("aten::copy_", 3, 1), op("aten::mm", 8, 1),
        op("aten::add", 20, 4), op("aten::add", 5, 4, tid=2),
    ]  # fmt: skip
    trace = of(tmp_path, events[::-1] if turned else events)
    assert trace.on == "cpu"
    assert sums(trace) == {"bf16_gemm": (3, 9.0), "copy": (1, 1.0), "elementwise": (2, 8.0)}
    # Of two that begin at once the longer is outside.
    assert {k.name: k.time_ns for k in trace.kernels}["aten::linear"] == 4000
    [device] = trace.devices
    assert (device.streams, device.busy_ns, device.idle_ns) == (2, 14000, 10000)


# Any trace, by counting quarters of a microsecond


def covered(events):
    quarters = {q for e in events for q in range(int(e["ts"] * 4), int((e["ts"] + e["dur"]) * 4))}
    return 250 * len(quarters)


def test_sums_hold_for_any_trace(tmp_path):
    draw = random.Random(0)
    for _ in range(40):
        events = [
            kernel(draw.choice([MM, NORM, MLA, "my_own_kernel", *COMMUNICATING]), draw.randint(0, 400) / 4,
                   draw.randint(0, 60) / 4, stream=stream, device=draw.randint(0, 1))
            for stream in range(draw.randint(1, 30))
        ]  # fmt: skip
        trace = of(tmp_path, events)
        total = sum(int(event["dur"] * 1000) for event in events)
        for parts in (trace.kernels, trace.by_class().values()):
            assert (sum(p.time_ns for p in parts), sum(p.calls for p in parts)) == (total, len(events))
        for device in trace.devices:
            mine = [event for event in events if str(event["pid"]) == device.name]
            computing = [event for event in mine if event["name"] not in COMMUNICATING]
            communicating = [event for event in mine if event["name"] in COMMUNICATING]
            assert (device.busy_ns, device.communication_ns) == (covered(mine), covered(communicating))
            assert device.exposed_communication_ns == covered(mine) - covered(computing)
            assert device.sum_ns == sum(int(event["dur"] * 1000) for event in mine)
        busy = sum(device.busy_ns for device in trace.devices)
        assert sum(row.exposed_ns for row in trace.kernels) == pytest.approx(busy)
        for row in trace.kernels:
            assert row.exposed_ns <= row.time_ns + 1e-3


def test_operators_own_times_cover_each_thread_once(tmp_path):
    draw = random.Random(0)
    for _ in range(40):
        events = [
            op("aten::mm", draw.randint(0, 40) / 4, draw.randint(0, 80) / 4, tid=draw.randint(0, 2))
            for _ in range(draw.randint(1, 25))
        ]
        trace = of(tmp_path, events)
        assert trace.time_ns() == sum(covered([e for e in events if e["tid"] == tid]) for tid in range(3))
        assert sum(kernel.calls for kernel in trace.kernels) == len(events)


# One stream is serial: what cannot be so is flagged, and not in the times


def kernels_of(events):
    return [event for event in events if event["cat"] == "kernel"]


def spoiled(change):
    """The steps with something done to the list of their kernels; what was right stays in place."""
    events = decode_steps()
    change(kernels_of(events), events)
    return events


def lengthened(*numbers, to):
    def change(kernels, events):
        for number in numbers:
            kernels[number]["dur"] = to(kernels[number]["dur"])

    return change


TWICE, LONG, MERGED = "recorded twice", "longer than one stream allows", "merged"


@pytest.mark.parametrize(("change", "said", "more_us"), [
    (lambda kernels, events: None, [], 0),
    # 27 ns of rounding, and 4 us of programmatic dependent launch
    (lambda kernels, events: [k.update(dur=k["dur"] + 1.027) for k in kernels], [], 72 * 1.027),
    (lambda kernels, events: [k.update(dur=k["dur"] + 5) for k in kernels], [], 72 * 5),
    (lambda kernels, events: [k["args"].update(stream=2**60 + i % 2) for i, k in enumerate(kernels)], [], 0),
    (lengthened(2, to=lambda us: us + 5), [], 5),
    (lengthened(7, to=lambda us: 1.6e6), [LONG], 1),
    (lengthened(7, 8, 9, to=lambda us: 1.6e6), [LONG] * 3, 3),
    (lengthened(1, 22, 40, 70, to=lambda us: 12 * us), [LONG] * 2, 4),
    (lengthened(4, to=lambda us: 2 * us), [LONG], 1),
    (lengthened(71, to=lambda us: 800), [], 800 - 18),  # the last one communicates, and may wait
    (lambda kernels, events: events.extend(dict(k) for k in kernels), [TWICE], 0),
    (lambda kernels, events: events.extend(map(dict, [*events])), [TWICE], 0),
    (lambda kernels, events: events.append(kernels[3] | {"dur": 4e5}), [TWICE], 0),
    (lambda kernels, events: events.append(kernel(MM, 0, 5)), ["hours before"], 0),
    (lambda kernels, events: events.insert(0, kernel(MM, 0, 1.7e15)), ["no duration", "hours before"], 0),
    (lambda kernels, events: events.append(kernel(MM, 1.8e15, 5)), ["hours before"], 0),
])  # fmt: skip
def test_a_stream_runs_one_kernel_after_another(tmp_path, change, said, more_us):
    trace = of(tmp_path, spoiled(change))
    found = [finding for finding in trace.findings if finding.severity == "wrong"]
    assert len(found) == len(said)
    assert all(any(each in finding.message for finding in found) for each in said), found
    assert trace.time_ns() / 1e3 == pytest.approx(4 * 423 + more_us)
    assert sum(times.calls for times in trace.by_class().values()) == 72
    assert len(trace.steps_of("decode")) == 4 and trace.devices[0].span_ns < 3e6


def test_the_last_kernel_of_a_stream_is_held_to_its_usual_length(tmp_path):
    trace = of(tmp_path, [kernel(MM, 10 * i, 5 if i < 9 else 1.6e6) for i in range(10)])
    assert trace.time_ns() == 50_000 and LONG in trace.findings[0].message


@pytest.mark.parametrize("with_launches", [True, False])
@pytest.mark.parametrize("later_us", [3.0, 30.5, 5e5])
def test_merged_ranks_are_told(tmp_path, with_launches, later_us):
    """Two ranks' kernels under one device and one stream, at once; or one trace after another."""
    events = decode_steps()
    other = [event | {"ts": event["ts"] + later_us} for event in decode_steps()]
    if not with_launches:
        events, other = kernels_of(events), kernels_of(other)
    trace = of(tmp_path, events + other)
    said = [finding.message for finding in trace.findings if finding.rule == "merged"]
    at_once = later_us < 2000
    assert len(said) == at_once + (with_launches and not at_once), said


def test_dependent_launch_is_no_merge(tmp_path):
    """Of kernels of 5 us each begins 2 us before the last one ends: 40 % overlap."""
    events = [kernel((MM, NORM, MLA)[i % 3], 3 * i, 5) for i in range(60)]
    [finding] = of(tmp_path, events).findings
    assert (finding.rule, finding.severity) == ("overlap", "note")
    [finding] = of(tmp_path, [*events, *(kernel(REDUCE, 3 * i + 0.5, 1) for i in range(60))]).findings
    assert (finding.rule, finding.severity) == ("merged", "wrong"), "kernels end within others"


def test_a_call_recorded_at_two_levels_is_one(tmp_path):
    """Whenever it is: here just before and after a multiple of 10 ms."""
    launches = [launch(1, 9999.9995), launch(1, 10000.0005, name="hipLaunchKernel")]
    events = [*launches, kernel(MM, 10010, 5, correlation=1)]
    assert not of(tmp_path, events).findings
    apart = [*events, launch(1, 30000)]
    assert [finding.rule for finding in of(tmp_path, apart).findings] == ["merged"]


def test_operators_that_stand_twice_count_once(tmp_path):
    events = [op("aten::mm", 10 * i, 5, external=i) for i in range(1, 9)]
    trace = of(tmp_path, events + events)
    assert sums(trace) == {"bf16_gemm": (8, 40.0)}
    assert "recorded twice" in trace.findings[0].message


def test_an_operator_hours_from_the_others_does_not_count(tmp_path):
    trace = of(tmp_path, [op("aten::mm", 1e12 + 10 * i, 5) for i in range(10)] + [op("aten::mm", 0, 5)])
    assert sums(trace) == {"bf16_gemm": (10, 50.0)} and trace.devices[0].span_ns == 95_000
    assert "operators left out, as they begin hours before" in trace.findings[0].message


# Published and recorded traces (tests/data/serving/traces/README.md)


CPU = FOLDER / "vllm_cpu_deepseek_v3.json.gz"


def test_what_is_printed_of_every_trace(here, snapshot, monkeypatch):
    """What it says was counted by hand once: 24 layers of an attention and two experts' products in vLLM's
    graph, 36 dense ones of four products in SGLang's prefill, 46 % of the training in communication, mostly
    hidden."""
    monkeypatch.chdir(FOLDER)  # so that lines wrap alike in every checkout
    files = sorted([*FOLDER.glob("*.gz"), *MADE.iterdir()])
    shown = "".join(here("serving", "trace", file.relative_to(FOLDER)).stdout for file in files)
    shown += here("serving", "trace", CPU.name, "--phase", "decode", "--top", "3").stdout
    shown += here("serving", "trace", "made/unknown_kernels.json", "--json", "-").stdout
    none = here("serving", "trace", FOLDER / "deepseek_v3_training.json.gz", "--phase", "decode")
    assert "has no decode steps; it has: training" in error_line(none)
    snapshot(Path(__file__).with_name("traces.txt"), shown)
