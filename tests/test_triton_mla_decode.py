"""The Triton split-KV kernels: right in the interpreter, and compiled for GPUs that need not be here.

Whether Triton interprets is settled when it is imported. So the interpreted cases run in one process of
their own (this file, started as a script), and the test process compiles.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from harness.architectures import architectures
from kernels.mla_decode import triton_split_kv as provider
from kernels.mla_decode.problem import Sizes
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.platform import named
from kernels.triton_runtime import CPU, INTERPRETER
from shapes.case import parse

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compiled import TARGETS, compiled  # noqa: E402

OP = kernels.OPS["mla_decode"]
IMPLEMENTATION = provider.SplitKv()

# Sizes, then tokens per step and splits (None: the provider's choice). With lengths of 1, 150 and 300 and
# 32 tokens a step there are splits without a token, and sequences that end inside a step and a page.
RAGGED = "batch=3 ctx=1..300"
CASES = [
    ("batch=1 ctx=1", None, None),
    ("batch=2 ctx=1100..1300", None, None),
    ("batch=2 ctx=1100..1300 kv=fp8", None, None),
    ("batch=1 ctx=1 page=1", 32, 7),
    ("batch=2 ctx=64 page=64", 32, 2),
    ("batch=2 ctx=31..65 heads=128 page=16", 16, 7),
    *((f"{RAGGED} page={page}", 32, 2) for page in (1, 16, 48, 512)),
    *((f"{RAGGED} page={page} kv=fp8", 32, 2) for page in (1, 48)),
    *((f"{RAGGED} heads={heads} page=16", 32, 2) for heads in (1, 20, 32)),
    *((f"{RAGGED} kv={kv}", 32, splits) for kv in ("bf16", "fp8") for splits in (1, 2, 7)),
]


def sizes_of(text: str) -> Sizes:
    return OP.sizes(parse(text)[0])


def interpret(text: str, tokens: int | None, splits: int | None) -> dict[str, list[float]]:
    """Errors as parts of the tolerance: of the first call, and of one after other q and kv were loaded."""
    sizes = sizes_of(text)
    tolerance = OP.tolerance(sizes)
    operands, out = OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu")
    if splits is None:
        prepared = IMPLEMENTATION.prepare(operands, out)
    else:
        config = dataclasses.replace(IMPLEMENTATION.heuristic(CPU, sizes), tokens=tokens)
        prepared = provider._SplitKv(operands, out, config, splits)

    errors: dict[str, list[float]] = {"row": [], "element": []}
    for live in (0, 1):
        prepared.load(OP.operands(sizes, Seeds(live=live), "cpu").live_tensors())
        for buffer in (out, prepared.partial, prepared.log_sums):
            buffer.fill_(float("nan"))
        prepared.call()
        reference = OP.reference(operands)
        error = (prepared.result().double() - reference.value) / reference.sigma
        errors["row"].append(error.square().mean(-1).sqrt().max().item() / tolerance.row)
        errors["element"].append(error.abs().max().item() / tolerance.element)
    return errors


@pytest.fixture(scope="module")
def interpreted() -> list[dict[str, list[float]]]:
    root = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (root, root / "tests")))
    environment = os.environ | INTERPRETER | {"PYTHONPATH": path}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning" not in done.stderr, "computes what it should not:\n" + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[" ".join(map(str, case)) for case in CASES])
def test_interpreted(interpreted: list[dict[str, list[float]]], index: int) -> None:
    assert all(error <= 1 for errors in interpreted[index].values() for error in errors), interpreted[index]


def test_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    sizes = sizes_of("batch=1 ctx=1")
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        IMPLEMENTATION.prepare(OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu"))
    for kind in ("cpu", "cuda", "rocm"):
        assert IMPLEMENTATION.interpreted(named(kind)) == (kind == "cpu")
        assert ("TRITON_INTERPRET" in IMPLEMENTATION.environment(named(kind))) == (kind == "cpu")


@pytest.mark.parametrize("target", architectures())
def test_workspace_is_a_bound(target: str) -> None:
    at = architectures()[target].target
    for batch, heads, ctx in itertools.product((1, 7, 64, 512), (16, 20, 128), ("1", "3200..3999", "131072")):
        sizes = sizes_of(f"batch={batch} heads={heads} ctx={ctx}")
        for config in IMPLEMENTATION.configurations(at, sizes):
            operands, out = OP.empty_operands(sizes, "meta"), OP.empty_output(sizes, "meta")
            prepared = IMPLEMENTATION.prepare_with(config, at, operands, out)
            taken = prepared.partial.nbytes + prepared.log_sums.nbytes
            assert taken <= IMPLEMENTATION.workspace(sizes), (sizes, config)


# The instruction for 128 heads over a bf16 cache.
INSTRUCTIONS = {
    "gfx942": "v_mfma_f32_16x16x16_bf16",
    "gfx950": "v_mfma_f32_16x16x32_bf16",
    "sm_90": "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "sm_100": "tcgen05.mma.cta_group::1.kind::f16",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("text", ["batch=4 heads=16", "batch=450 heads=16 page=1", "batch=4 heads=128"])
def test_compiles(target: str, kv: str, text: str) -> None:
    found = compiled("mla_decode", target, f"{text} ctx=4096 kv={kv}")
    assert ("combine_kernel" in found) == ("batch=4 " in text)
    if kv == "bf16" and "heads=128" in text:
        assert INSTRUCTIONS[target] in found["split_kernel"].instructions


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(interpret(*case)))
