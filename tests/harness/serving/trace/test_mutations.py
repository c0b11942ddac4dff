"""Good traces with something wrong in them: one line or a sum that holds, never a traceback."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from harness.serving.clients.files import UnreadableError
from harness.serving.trace import decompose
from tests.support.traces import FLASH, MM, NORM, REDUCE, kernel, launch, op, span

WRONG: tuple[Any, ...] = (
    None, True, "", "x", "1e400", "-1", -1, 0, 1e18, 10**25, float("nan"), float("inf"), [], {}, [1],
    {"a": 1}, [[[]]], "NaN", "12.5", 2**63, -(2**70),
)  # fmt: skip
TORCH = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
    "distributedInfo": {"rank": 0, "world_size": 8},
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "x"}},
        span("execute_context_1(8)_generation_0(0)", 0, 50),
        op("aten::mm", 1, 9, external=1, dims=[[1, 2], [2, 3]]),
        launch(1, 2), kernel(MM, 12, 6, correlation=1),
        launch(2, 11), kernel(REDUCE, 15, 9, stream=8, correlation=2),
        {"ph": "B", "cat": "kernel", "name": NORM, "pid": 0, "tid": 7, "ts": 30},
        {"ph": "E", "pid": 0, "tid": 7, "ts": 35}, launch(3, 13), kernel(FLASH, 40, 2, correlation=3),
    ],
}  # fmt: skip


def places(value: Any, keys: tuple = ()) -> list[tuple]:
    """The way to each value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, one in inner for p in ((*keys, key), *places(one, (*keys, key)))]


def mutated(good: dict, seed: int) -> str:
    """One to three values replaced, left out, or doubled; or the text itself cut or overwritten."""
    draw = random.Random(seed)
    bad = copy.deepcopy(good)
    for _ in range(draw.randint(1, 3)):
        *way, last = draw.choice(places(bad))
        at = bad
        for key in way:
            at = at[key]
        match draw.randrange(3):
            case 0:
                del at[last]
            case 1 if isinstance(at, list):
                at.append(copy.deepcopy(at[last]))
            case _:
                at[last] = draw.choice(WRONG)
    text = json.dumps(bad)
    if draw.random() < 0.2:
        cut = draw.randrange(len(text))
        text = text[:cut] + draw.choice(["", "\x00", "}", "]", '"', "\\"]) + text[cut + draw.randrange(3) :]
    return text


def test_mutations(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    refused = 0
    for seed in range(120):
        path.write_text(mutated(TORCH, seed))
        try:
            trace = decompose(path, partial=seed % 2 == 0)
        except UnreadableError as error:
            refused += 1
            assert "\n" not in str(error), seed
            continue
        total = trace.time_ns()
        assert total == sum(k.time_ns for k in trace.kernels) == sum(d.sum_ns for d in trace.devices), seed
        busy = sum(device.busy_ns for device in trace.devices)
        assert sum(row.exposed_ns for row in trace.classes) == pytest.approx(busy), seed
    assert 5 < refused < 100
