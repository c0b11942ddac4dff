"""Traces as they come: out of order, cut short, in pieces, large."""

import gzip
import json
import tracemalloc

import pytest

from harness import json_stream
from harness.errors import UnreadableError
from harness.serving.trace import decompose
from tests.support.command_line import error_line
from tests.support.traces import MM, NORM, REDUCE, event, kernel, launch, of, op, small, span, sums, text


def times(trace):
    return {name: us for name, (_, us) in sums(trace).items()}


def test_order_pieces_packing_and_head_do_not_matter(tmp_path, monkeypatch):
    events = [kernel(MM, 5.25, 2.5), {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "x"}},
              kernel(NORM, 1.0, 2, device="0", stream="7"), kernel(MM, 1, 0.75, stream=8)]  # fmt: skip
    head = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
            "distributedInfo": {"rank": 3, "world_size": 8}}  # fmt: skip
    first = json.dumps({**head, "traceEvents": events}).encode()
    last = json.dumps({"traceEvents": events[::-1], **head}, indent=2).encode()
    for piece in (1, 7, 1 << 20):
        monkeypatch.setattr(json_stream, "PIECE", piece)
        for raw in (first, last, gzip.compress(first), b"\xef\xbb\xbf" + first):
            trace = decompose(small(tmp_path, raw))
            assert times(trace) == {"bf16_gemm": 3.25, "norm": 2.0}
            [device] = trace.devices
            assert (trace.rank, trace.world_size, device.model, device.streams) == (3, 8, "NVIDIA H200", 2)


@pytest.mark.parametrize(("ts", "dur", "following", "sum_ns", "span_ns"), [
    (1740461679479712, "2.125", 1740461679479720, 3125, 9000),
    (1740461679479712.0, "2.125", 1740461679479720, 3125, 9000),
    ("1740461679479712", "2.125", 1740461679479720, 3125, 9000),
    ("1740461679479712.25", "2.125", 1740461679479720, 3125, 8750),
    (4909913692259.934, 14.452, 4909913692274.5, 15452, 15566),  # nanoseconds of long uptimes are kept
])  # fmt: skip
def test_times_as_numbers_and_as_text(tmp_path, ts, dur, following, sum_ns, span_ns):
    trace = of(tmp_path, [kernel(MM, ts, dur), kernel(NORM, following, 1)])
    assert trace.time_ns() == sum_ns
    assert trace.devices[0].span_ns == pytest.approx(span_ns, abs=1)


def test_what_has_no_time_or_no_end_is_said(tmp_path, here):
    trace = of(tmp_path, [
        {**kernel(MM, 0, 1), "dur": None}, kernel(MM, None, 1), kernel(MM, "soon", 1), kernel(MM, 5, -3),
        kernel(MM, float("nan"), 1), {**kernel(NORM, 3, 1), "ph": "B"}, 7, kernel(REDUCE, 9, 4),
    ])  # fmt: skip
    assert sums(trace) == {"all_reduce": (1, 4.0), "bf16_gemm": (2, 0.0)}
    said = " | ".join(finding.message for finding in trace.findings)
    for what in ("2 times: a kernel event has no duration", "3 times: a kernel event has no time",
                 "once: a kernel event begins and ends apart", "no object"):  # fmt: skip
        assert what in said
    assert all(finding.severity == "wrong" for finding in trace.findings)
    assert here("serving", "trace", trace.path).returncode == 1


@pytest.mark.parametrize("bare", ["-Infinity", "Infinity", "NaN"])
@pytest.mark.parametrize("piece", [5, 1 << 20])
def test_numbers_that_are_none_are_read(tmp_path, monkeypatch, bare, piece):
    """Python writes them so; a duration of one is none."""
    monkeypatch.setattr(json_stream, "PIECE", piece)
    events = [kernel(NORM, 3, 2) | {"dur": "BARE"}, kernel(MM, 9, 5) | {"args": {"bandwidth": "BARE"}}]
    raw = text(events).replace('"BARE"', bare)
    assert times(decompose(small(tmp_path, raw))) == {"bf16_gemm": 5.0, "norm": 0.0}
    with pytest.raises(UnreadableError, match=f"at character {raw.index(bare)}: Expecting value"):
        decompose(small(tmp_path, raw.replace(bare, "infx", 1)))


WHOLE = text(
    [span("step[DECODE bs=1]", 0, 9), op("aten::mm", 0, 5, dims=[[1, 2]]), launch(1, 1),
     kernel(MM, 3, 2.5, correlation=1), kernel("naïve \"kernel\" \\ 💡", 9, 1)],
    deviceProperties=[{"id": 0, "name": "NVIDIA H200", "flags": [True, False, None] * 3}],
)  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_short_is_refused_or_taken_as_far_as_it_goes(tmp_path, packed, here):
    raw = WHOLE.encode()
    raw = gzip.compress(raw) if packed else raw
    for end in range(1, len(raw) - (0 if packed else 1), 7):
        with pytest.raises(UnreadableError, match=r"^cannot read [^\n]*$") as error:
            decompose(small(tmp_path, raw[:end]))
        assert end < 20 or "ends in the middle" in str(error.value)
    raw = WHOLE[: WHOLE.index("na\\u00efve")].encode()
    path = small(tmp_path, gzip.compress(raw)[:-8] if packed else raw)
    trace = decompose(path, partial=True)
    assert trace.partial and times(trace) == {"bf16_gemm": 2.5}
    shown = here("serving", "trace", "--partial", path)
    assert shown.returncode == 1 and "BROKEN OFF" in shown.stdout


@pytest.mark.parametrize(("raw", "why"), [
    ("", "it is empty"),
    ('{"traceEvents": []}', "neither kernels nor operators"),
    ('{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "at character 29: ',' or ']' is wanted, not '{'"),
    ('{"traceEvents": [{"ph": X' + 99 * " " + "}]}", "at character 24: Expecting value"),
    (f'{{"a": "{"x" * 900}"}}', "a value of more than 0 MiB"),
    ('{"traceEvents": [{"ph": "X"}]} more', "more after the end"),
    ('{"traceEvents" [', "broken JSON"), ('{"a": "x\\q"}', "broken JSON at character 8: Invalid"),
    ("{1: 2}", "a key is wanted"),
    ('{"a": ' + "[" * 100_000, "nested too deep"),
    ("Name,Calls\nmm,3\n", "wanted is a trace of torch.profiler"),
    ("\x1f\x8b\x08\x00nonsense", "cannot read"),
    ('{"traceEvents": [{"ph": "X", "cat": "python_function"}]}', "its events: 1 python_function"),
    ('{"traceEvents": [{"ph": "X", "name": "a", "args": {"BeginNs": "1", "DurationNs": "2"}}]}',
     "rocprof 1's results.json; record with rocprofv3 --kernel-trace"),
    ("NSYS\0\0\x01", "a report of Nsight Systems; nsys stats --report cuda_gpu_trace"),
    ("SQLite format 3\0", "an SQLite database"), ("NVR\0\x01", "Nsight Compute"),
    ("PK\x03\x04", "a zip archive"),
    ("\n,\x08\x01\x10\x80\x80\x04\xb3", "a binary trace of Perfetto; record with rocprofv3"),
    ("\n{\x08\x01\x10", "a binary trace of Perfetto"), ("\x28\xb5\x2f\xfd\x04", "packed, and not"),
    ("\x80\x04\x95", "a Python pickle"), ("\x7fELF\0", "binary, of no profiler"),
    ('"Name","Calls","TotalDurationNs","AverageNs"\n"a",1,2,3\n', "a table of sums"),
    ("Time (%),Total Time (ns),Instances,Avg (ns),Name\n99,2,1,2,a\n", "a table of sums"),
    ('"Kind","Direction","Source_Agent_Id"\n', "a trace of copies"),
    ('"Domain","Function","Process_Id"\n', "a trace of API calls"),
    (' Start (ns)  Duration (ns)  CorrId\n', "nsys stats' table in columns"),
    ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a pointer of Git LFS"),
    ('[{"frame": {"name": "ROOT"}, "metrics": {"time (ns)": 3}, "children": []}]', "Proton's tree"),
])  # fmt: skip
def test_what_is_no_trace_is_said_in_one_line(tmp_path, raw, why, here, monkeypatch):
    monkeypatch.setattr(json_stream, "PIECE", 7)
    monkeypatch.setattr(json_stream, "LARGEST_VALUE", 500 if "xxx" in raw else 1 << 20)
    assert why in error_line(here("serving", "trace", small(tmp_path, raw.encode("latin-1"))))


def test_a_file_that_only_its_name_tells(tmp_path):
    for name, said in (("a.nsys-rep", "a report of Nsight Systems"), ("a.pb", "an XPlane")):
        path = tmp_path / name
        path.write_bytes(b"\n\2\3")
        with pytest.raises(UnreadableError, match=said):
            decompose(path)


ROCPROF3 = '"Kind","Agent_Id","Queue_Id","Stream_Id","Kernel_Name","Start_Timestamp","End_Timestamp"\n'
ROCPROF1 = "Index,KernelName,gpu-id,queue-id,DispatchNs,BeginNs,EndNs,CompleteNs\n"
for i in range(4):
    begin = 10**15 + 60_000 * i
    ROCPROF3 += f'"KERNEL_DISPATCH","Agent 4",1,{i % 2},"fused_moe_kernel.kd",{begin},{begin + 55_000}\n'
    ROCPROF1 += f'{i},"fused_moe_kernel(int, float) [clone .kd]",4,0,1,{begin},{begin + 55_000},1\n'
NSYS = "Processing [a.sqlite]...\n\nStart (us),Duration (us),CorrId,Device,Ctx,GreenCtx,Strm,Name\n"
for i, name in enumerate(["fused_moe_kernel"] * 3 + ["[CUDA memset]"]):
    NSYS += f"{1e3 + 60 * i},55.0,{i},NVIDIA H200 (0),1,,{7 + i % 2},{name}\n"


@pytest.mark.parametrize(("table", "streams", "source"), [
    (ROCPROF3, 2, "rocprof"), (ROCPROF3[:-1], 2, "rocprof"), (ROCPROF1, 1, "rocprof"), (NSYS, 2, "nsys"),
    (NSYS.replace(",", "\t"), 2, "nsys"), (NSYS.encode("utf-16"), 2, "nsys"),
])  # fmt: skip
def test_tables_of_kernels(tmp_path, table, streams, source):
    trace = decompose(small(tmp_path, table))
    classes = {"fused_moe": 165.0, "copy": 55.0} if source == "nsys" else {"fused_moe": 220.0}
    assert (times(trace), trace.devices[0].streams, trace.source) == (classes, streams, source)
    assert trace.devices[0].span_ns == 235_000 and not trace.findings


def test_rows_of_tables_that_are_no_kernels(tmp_path):
    """A start of 0 (rocm-systems issue 5811), an end before the start, a last row that breaks off."""
    for broken in (ROCPROF3.replace(str(10**15 + 60_000), "0"), ROCPROF3.replace(str(10**15 + 115_000), "7")):
        trace = decompose(small(tmp_path, broken))
        assert (times(trace), trace.devices[0].span_ns) == ({"fused_moe": 165.0}, 235_000)
        assert [finding.severity for finding in trace.findings] == ["wrong"]
    for end in (1, 5, 30):
        with pytest.raises(UnreadableError, match="ends in the middle"):
            decompose(small(tmp_path, ROCPROF3[: -end - 1]))
    assert times(decompose(small(tmp_path, ROCPROF3[:-30]), partial=True)) == {"fused_moe": 165.0}
    with pytest.raises(UnreadableError, match="neither kernels"):
        decompose(small(tmp_path, ROCPROF3[: ROCPROF3.index("\n") + 1]))
    trace = decompose(small(tmp_path, NSYS.replace("1060.0,55.0", "1060.0,inf")))
    assert times(trace) == {"fused_moe": 110.0, "copy": 55.0} and "make no sense" in trace.findings[0].message


def test_a_copy_is_the_gpus_whichever_way_it_goes(tmp_path):
    def record(source, to, start):
        times_ = {"start_timestamp": start, "end_timestamp": start + 5}
        return times_ | {"src_agent_id": {"handle": source}, "dst_agent_id": {"handle": to}}

    agents = [{"id": {"handle": 1}, "type": 1}, {"id": {"handle": 4}, "type": 2, "product_name": "MI300X"}]
    copies = [record(1, 4, 10), record(4, 1, 20)]
    tool = {"metadata": {"pid": 7}, "agents": agents, "buffer_records": {"memory_copy": copies}}
    [device] = decompose(small(tmp_path, json.dumps({"rocprofiler-sdk-tool": [tool]}))).devices
    assert (device.model, device.calls, device.sum_ns) == ("MI300X", 2, 10)


def test_memory_grows_with_events_not_with_the_file(tmp_path):
    """The bound that harness/serving/trace/profilers.py states: 100 bytes of an event."""
    call = event("python_function", "vllm/models/deepseek_v2.py", 1, 9, text="x" * 1000)
    events = 8_000
    path = small(tmp_path, text([kernel(MM, 1, 2), *[call] * events]))
    decompose(path)  # what is loaded once
    tracemalloc.start()
    decompose(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * events + (4 << 20) < path.stat().st_size / 1.5
