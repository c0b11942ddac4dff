"""The Triton flash kernel: right in the interpreter, and compiled for GPUs that need not be here.

As in test_triton_mla_decode, the interpreted cases run in a process of their own: this file as a script.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kernels
from harness.check import judge
from kernels.mha_prefill import triton_flash as provider
from kernels.mha_prefill.problem import sequences_of
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.platform import named
from kernels.triton_runtime import CPU, INTERPRETER
from kernels.tuning import Target
from shapes.case import parse

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compiled import TARGETS, compiled  # noqa: E402

OP = kernels.OPS["mha_prefill"]
IMPLEMENTATION = next(i for i in kernels.implementations("mha_prefill") if i.name == "triton.flash_varlen")

# Sizes, then query rows and keys of a tile: with tiles this small there are blocks before the diagonal, on it
# and behind it, and sequences that end inside a tile, at its edge and one row behind.
RAGGED = "batch=3 new=1..90 prefix=0..70 heads=2"
CASES = [
    ("batch=1 new=1 heads=1", 128, 128),
    ("batch=1 new=300 prefix=40 heads=1", 128, 128),
    (RAGGED, 16, 16),
    (RAGGED, 32, 16),
    (RAGGED, 16, 64),
    (RAGGED, 64, 32),
    ("batch=3 new=63..65 heads=3", 32, 32),
    ("batch=2 new=1 prefix=64..95 heads=2", 32, 32),
    ("batch=2 new=64 prefix=1 heads=2", 32, 32),
]
INSTRUCTIONS = {
    "gfx942": "v_mfma_f32_16x16x16_bf16",
    "gfx950": "v_mfma_f32_16x16x32_bf16",
    "sm_90": "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "sm_100": "tcgen05.mma.cta_group::1.kind::f16",
}


def sizes_of(text: str):
    return OP.sizes(parse(text)[0])


def interpret(text: str, rows: int, keys: int) -> list[dict[str, Any]]:
    """Reports of the first call, and of one after other q, k and v were loaded."""
    sizes = sizes_of(text)
    operands, out = OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu")
    prepared = IMPLEMENTATION.prepare_with(provider.Config(rows, keys), CPU, operands, out)
    reports = []
    for live in (0, 1):
        prepared.load(OP.operands(sizes, Seeds(live=live), "cpu").live_tensors())
        for buffer in (out, prepared.written):
            buffer.fill_(math.nan)
        prepared.call()
        reference = OP.reference(operands)
        reports.append(judge(prepared.result(), reference, OP.tolerance(sizes), tuple(out.shape)))
    return reports


@pytest.fixture(scope="module")
def interpreted() -> list[list[dict[str, Any]]]:
    root = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (root, root / "tests")))
    environment = os.environ | INTERPRETER | {"PYTHONPATH": path}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning" not in done.stderr, "computes what it should not:\n" + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[" ".join(map(str, case)) for case in CASES])
def test_interpreted(interpreted: list[list[dict[str, Any]]], index: int) -> None:
    assert all(report["ok"] for report in interpreted[index]), interpreted[index]


def test_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    sizes = sizes_of("batch=1 new=1")
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        IMPLEMENTATION.prepare(OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu"))
    for kind in ("cpu", "cuda", "rocm"):
        assert IMPLEMENTATION.interpreted(named(kind)) == (kind == "cpu")


@pytest.mark.parametrize("rows", [64, 128])
def test_tiles_cover_every_row_once_the_longest_first(rows: int) -> None:
    sequences = sequences_of([(0, 1), (300, 200), (5, 64), (0, 129)])
    tiles = provider.tiles_of(sequences, rows)
    covered = [(i, row) for i, first in tiles for row in range(first, min(first + rows, sequences[i].new))]
    assert sorted(covered) == [(i, row) for i, s in enumerate(sequences) for row in range(s.new)]
    first_keys = [sequences[i].prefix + first for i, first in tiles]
    assert first_keys == sorted(first_keys, reverse=True)


def test_a_case_too_long_to_interpret_says_so() -> None:
    case = OP.case({"batch": 40, "new": "3200"})
    support = IMPLEMENTATION.supports(case, named("cpu"))
    assert not support.ok and "interpreting one call would take" in support.reason
    assert IMPLEMENTATION.supports(case, named("cuda")).ok
    assert IMPLEMENTATION.interpreted_s(sizes_of("batch=1 new=130 heads=2")) < 1


def on_no_device(text: str, kind: str) -> provider._FlashVarlen:
    """Prepared on torch's meta device: shapes and types without memory."""
    sizes = sizes_of(text)
    operands = OP.empty_operands(sizes, "meta")
    target = Target(kind, "", 128)
    return IMPLEMENTATION.prepare_for(target, operands, OP.empty_output(sizes, "meta"))


@pytest.mark.parametrize("kind", provider.HEURISTIC)
@pytest.mark.parametrize("text", ["batch=1 new=1", "batch=7 new=1..600 heads=4", "batch=40 new=3200"])
def test_workspace_is_a_bound(kind: str, text: str) -> None:
    prepared = on_no_device(text, kind)
    apart = prepared.written.nbytes if prepared.written is not prepared.out else 0
    assert prepared.tiles.nbytes + apart <= IMPLEMENTATION.workspace(sizes_of(text))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("heads", [16, 20])
def test_compiles(target: str, heads: int) -> None:
    found = compiled("mha_prefill", target, f"batch=2 new=3200 prefix=0..70 heads={heads}")
    assert INSTRUCTIONS[target] in found["flash_kernel"].instructions


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(interpret(*case)))
