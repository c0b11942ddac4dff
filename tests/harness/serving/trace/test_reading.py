"""Traces as they come: out of order, cut short, in pieces, large."""

from __future__ import annotations

import gzip
import json
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.serving.clients.files import UnreadableError
from harness.serving.trace import decompose, json_stream
from harness.serving.trace.json_stream import items, opened
from tests.support.command_line import error_line
from tests.support.traces import MM, NORM, REDUCE, kernel, launch, op, span, text, write

Here = Callable[..., subprocess.CompletedProcess]


def small(folder: Path, raw: str | bytes, name: str = "t.json") -> Path:
    path = folder / name
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return path


def sums(path: Path, **how: bool) -> dict[str, float]:
    return {c: t.time_us for c, t in decompose(path, **how).by_class().items()}


def test_order_pieces_packing_and_head_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [kernel(MM, 5.25, 2.5), {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "x"}},
              kernel(NORM, 1.0, 2), kernel(MM, 1, 0.75, stream=8)]  # fmt: skip
    head = {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "distributedInfo": {"rank": 3, "world_size": 8},
    }
    first = json.dumps({**head, "traceEvents": events})
    last = json.dumps({"traceEvents": events[::-1], **head}, indent=2)
    for piece in (1, 7, 1 << 20):
        monkeypatch.setattr(json_stream, "PIECE", piece)
        for raw in (
            first.encode(),
            last.encode(),
            gzip.compress(first.encode()),
            b"\xef\xbb\xbf" + first.encode(),
        ):
            trace = decompose(small(tmp_path, raw))
            assert {c: t.time_us for c, t in trace.by_class().items()} == {"bf16_gemm": 3.25, "norm": 2.0}
            assert (trace.rank, trace.world_size, trace.devices[0].model) == (3, 8, "NVIDIA H200")


@pytest.mark.parametrize(
    "ts", [1740461679479712, 1740461679479712.0, "1740461679479712", "1740461679479712.25"]
)
def test_times_as_numbers_and_as_text(tmp_path: Path, ts: object) -> None:
    later = 1740461679479720
    trace = decompose(write(tmp_path, [kernel(MM, ts, "2.125"), kernel(NORM, later, 1)]))
    assert trace.by_class()["bf16_gemm"].time_ns == 2125
    assert trace.devices[0].span_ns == 9000 - (250 if str(ts).endswith(".25") else 0)


def test_nanoseconds_of_long_uptimes_are_kept(tmp_path: Path) -> None:
    events = [kernel(MM, 4909913692259.934, 14.452), kernel(NORM, 4909913692274.5, 1.0)]
    trace = decompose(write(tmp_path, events))
    assert trace.devices[0].span_ns == pytest.approx(15566, abs=1)
    assert trace.time_ns() == 15452


def test_begin_and_end_in_any_order_and_nested(tmp_path: Path) -> None:
    def half(ph: str, ts: float, cat: str | None, name: str = "") -> dict:
        return {
            "ph": ph,
            "ts": ts,
            "cat": cat,
            "name": name,
            "pid": 0,
            "tid": 7,
            "args": {"device": 0, "stream": 7},
        }

    events = [half("E", 9, None), half("B", 3, "kernel", MM), half("B", 1, "python_function", "f"),
              half("E", 5, "kernel"), half("B", 6, "kernel", NORM), half("E", 7.5, None)]  # fmt: skip
    trace = decompose(write(tmp_path, events))
    assert {c: t.time_us for c, t in trace.by_class().items()} == {"bf16_gemm": 2.0, "norm": 1.5}
    assert not trace.findings


def test_what_has_no_time_or_no_end_is_said(tmp_path: Path, here: Here) -> None:
    broken = [{**kernel(MM, 0, 1), "dur": None}, kernel(MM, None, 1), kernel(MM, "soon", 1),
              kernel(MM, 5, -3), kernel(MM, float("nan"), 1), {**kernel(NORM, 3, 1), "ph": "B"}, 7,
              kernel(REDUCE, 0, 4)]  # fmt: skip
    path = small(tmp_path, text(broken))
    trace = decompose(path)
    assert {c: (t.calls, t.time_us) for c, t in trace.by_class().items()} == {
        "all_reduce": (1, 4.0), "bf16_gemm": (2, 0.0), "norm": (1, 0.0),
    }  # fmt: skip
    said = " | ".join(finding.message for finding in trace.findings)
    for what in ("2 times: a kernel event has no duration", "3 times: a kernel event has no time",
                 "begins and never ends", "no object"):  # fmt: skip
        assert what in said
    assert all(finding.severity == "wrong" for finding in trace.findings)
    assert here("serving", "trace", path).returncode == 1


WHOLE = text(
    [span("step[DECODE bs=1]", 0, 9), op("aten::mm", 0, 5, dims=[[1, 2]]), launch(1, 1),
     kernel(MM, 3, 2.5, correlation=1), kernel("naïve \"kernel\" \\ 💡", 9, 1)],
    deviceProperties=[{"id": 0, "name": "NVIDIA H200"}],
)  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_short_is_refused_wherever_it_ends(tmp_path: Path, packed: bool) -> None:
    raw = WHOLE.encode()
    raw = gzip.compress(raw) if packed else raw
    for end in range(1, len(raw) - (0 if packed else 1), 7):
        with pytest.raises(UnreadableError) as error:
            decompose(small(tmp_path, raw[:end]))
        assert str(error.value).startswith("cannot read ")
        assert "\n" not in str(error.value)
        assert end < 20 or "ends in the middle" in str(error.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_short_can_be_taken_as_far_as_it_goes(tmp_path: Path, packed: bool, here: Here) -> None:
    raw = WHOLE[: WHOLE.index("na\\u00efve")].encode()
    path = small(tmp_path, gzip.compress(raw)[:-8] if packed else raw)
    trace = decompose(path, partial=True)
    assert trace.partial
    assert {c: t.time_us for c, t in trace.by_class().items()} == {"bf16_gemm": 2.5}
    shown = here("serving", "trace", "--partial", path)
    assert shown.returncode == 1
    assert "BROKEN OFF" in shown.stdout


@pytest.mark.parametrize(("raw", "why"), [
    ("", "it is empty"),
    ("  \n", "it is empty"),
    ("{}", "neither kernels nor operators"),
    ('{"traceEvents": []}', "neither kernels nor operators"),
    ('{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "broken JSON"),
    ('{"traceEvents": [{"ph": X}]}', "broken JSON"),
    ('{"traceEvents": [{"ph": "X"}]} more', "more after the end"),
    ('{"traceEvents" [', "broken JSON"),
    ("{1: 2}", "a key is wanted"),
    ('{"a": ' + "[" * 100_000, "nested too deep"),
    ("Name,Calls\nmm,3\n", "no column Kernel_Name"),
    ("\x1f\x8b\x08\x00nonsense", "cannot read"),
    ("\x7fELF\x00\x00", "no column Kernel_Name"),
])  # fmt: skip
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, raw: str, why: str, here: Here) -> None:
    path = small(tmp_path, raw.encode("latin-1"))
    assert why in error_line(here("serving", "trace", path))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60)
@given(values, st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_json_in_pieces_is_jsons_own(
    tmp_path_factory: pytest.TempPathFactory, value: object, piece: int, indent: int | None, ascii_only: bool
) -> None:
    path = small(tmp_path_factory.getbasetemp(), json.dumps(value, indent=indent, ensure_ascii=ascii_only))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "PIECE", piece)
        assert list(items(opened(path), lambda keys: False)) == [((), value)]
        entered = list(items(opened(path), lambda keys: True))
    assert entered == list(_leaves(value, ()))


def _leaves(value: object, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*keys, key))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, (*keys, "*"))
    else:
        yield keys, value


def test_memory_grows_with_events_not_with_the_file(tmp_path: Path) -> None:
    """The bound that harness/serving/trace/read.py states: 100 bytes of an event."""
    call = {"ph": "X", "cat": "python_function", "name": "vllm/models/deepseek_v2.py", "pid": 9, "tid": 1,
            "ts": 1, "dur": 9, "args": {"text": "x" * 1000}}  # fmt: skip
    events = 8_000
    path = write(tmp_path, [kernel(MM, 1, 2), *[call] * events])
    decompose(path)  # what is loaded once
    tracemalloc.start()
    decompose(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * events + (4 << 20) < path.stat().st_size / 1.5


# Good traces with something wrong in them: one line or a sum that holds, never a traceback
