"""The Triton split-K kernels: right in the interpreter, and compiled for GPUs that need not be here.

As in test_triton_mla_decode, the interpreted cases run in a process of their own: this file as a script.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kernels
from harness.architectures import architectures
from kernels.block_scale_gemm import triton_split_k as provider
from kernels.block_scale_gemm.problem import BlockScaleGemmOperands
from kernels.compose import bind
from kernels.formats import FORMATS, native
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.triton_runtime import INTERPRETER
from kernels.tuning import Target
from shapes.case import parse

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compiled import TARGETS, compiled  # noqa: E402
from judging import judged  # noqa: E402

OP = kernels.OPS["block_scale_gemm"]
IMPLEMENTATION = provider.SplitK()

# Sizes, boundary, splits (None: the provider's choice), and rows of a tile with whether it is swapped.
CASES: list[tuple[str, str, int | None, int, bool]] = [
    ("m=1 n=1 k=1", "core", None, 64, False),
    ("m=1 n=576 k=1024", "core", None, 64, False),
    ("m=9 n=300 k=1280", "core", 1, 16, True),
    ("m=9 n=300 k=1280", "core", 4, 16, True),
    ("m=70 n=200 k=1300", "core", 3, 64, False),
    ("m=150 n=129 k=640", "core", 5, 16, False),
    ("m=70 n=200 k=300 scales=ue8m0", "with_quant", 2, 64, False),
    ("m=5 n=160 k=384 fp8=e4m3fnuz", "core", 3, 16, True),
    ("m=5 n=160 k=200 fp8=e4m3fnuz scales=ue8m0", "with_quant", 1, 64, False),
    ("m=5 n=160 k=384 fp8=e4m3fnuz", "with_quant", None, 64, False),
]


def sizes_of(text: str):
    return OP.sizes(parse(text)[0])


class Tiled(provider.SplitK):
    """With a number of splits and a tile of the test's choosing."""

    def __init__(self, splits: int, rows: int, swap: bool) -> None:
        self.splits = splits
        self.forced = provider.Config(rows, 128, swap)

    def prepare_with(
        self, config: provider.Config, target: Target, operands: BlockScaleGemmOperands, out: torch.Tensor
    ) -> provider._SplitK:
        return provider._SplitK(operands, out, config, self.splits)


def interpret(text: str, boundary: str, splits: int | None, rows: int, swap: bool) -> list[dict[str, Any]]:
    """Reports of the first call, of one after other activations were loaded, and of one with codes of the
    largest magnitude only, which are 0x7F and 0xFF in e4m3fnuz."""
    sizes = sizes_of(text)
    implementation = IMPLEMENTATION if splits is None else Tiled(splits, rows, swap)
    operands, out = OP.operands(sizes, Seeds(), "cpu", boundary), OP.empty_output(sizes, "cpu")
    prepared = bind(OP, implementation, operands, out)
    inner = getattr(prepared, "inner", prepared)
    reports = []
    for step in range(3):
        if step == 1:
            live = OP.operands(sizes, Seeds(live=1), "cpu", boundary).live_tensors()
            prepared.load(live)
            for name, tensor in live.items():
                getattr(operands, name).copy_(tensor)
        elif step == 2:
            largest = FORMATS[sizes.fp8].max
            operands.b_q.copy_(torch.where(operands.b_q.float() < 0, -largest, largest))
        for buffer in (out, inner.parts, inner.written):
            buffer.fill_(math.nan)
        prepared.call()
        reports.append(judged(OP, IMPLEMENTATION, sizes, operands, prepared.result()))
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
    sizes = sizes_of("m=1 n=128 k=128")
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        IMPLEMENTATION.prepare(OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu"))


def test_no_split_is_without_a_block() -> None:
    config = provider.Config(64, 128)
    for k, units in itertools.product((1, 128, 1000, 7168, 18432), (1, 60, 132, 608)):
        splits = provider.splits_for(config, units, 1, 2112, k)
        blocks = math.ceil(k / 128)
        assert 1 <= splits <= max(1, blocks // provider.MIN_STEPS)
        assert (splits - 1) * math.ceil(blocks / splits) < blocks
    assert provider.splits_for(dataclasses.replace(config, per_unit=2), 132, 1, 2112, 7168) == 14


@pytest.mark.parametrize("arch", architectures())
def test_workspace_is_a_bound(arch: str) -> None:
    """On torch's meta device: shapes and types without memory."""
    target = architectures()[arch].target
    for m, n, k in itertools.product((1, 64, 300, 4096), (576, 2112, 36864), (256, 2048, 18432)):
        sizes = sizes_of(f"m={m} n={n} k={k} fp8={native(arch)}")
        operands, out = OP.empty_operands(sizes, "meta").narrowed(), OP.empty_output(sizes, "meta")
        for config in IMPLEMENTATION.configurations(target, sizes):
            prepared = IMPLEMENTATION.prepare_with(config, target, operands, out)
            taken = prepared.parts.nbytes + prepared.a_scale.nbytes
            assert taken <= IMPLEMENTATION.workspace(sizes), f"{sizes} {config}"


# The FP8 instructions of tiles for few and for many rows.
INSTRUCTIONS = {
    "gfx942": ("v_mfma_f32_16x16x32_fp8_fp8",) * 2,
    "gfx950": ("v_mfma_f32_16x16x128_f8f6f4",) * 2,
    "sm_90": (
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3",
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    ),
    "sm_100": ("tcgen05.mma.cta_group::1.kind::f8f6f4",) * 2,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize("k", [7168, 7216])
def test_compiles(target: str, m: int, k: int) -> None:
    found = compiled("block_scale_gemm", target, f"m={m} n=2112 k={k}", "gemm_kernel", "sum_kernel")
    assert INSTRUCTIONS[target][m > 16] in found["gemm_kernel"].instructions
    assert ("sum_kernel" in found) == (m < 4096)


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(interpret(*case)))
