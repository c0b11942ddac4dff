"""The Triton MoE kernels: right in the interpreter, and compiled for GPUs that need not be here.

As in test_triton_mla_decode, the interpreted cases run in a process of their own: this file as a script.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from harness.architectures import architectures
from kernels.compose import bind
from kernels.fused_moe import triton_grouped as provider
from kernels.fused_moe.problem import Sizes
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.platform import named
from kernels.triton_runtime import INTERPRETER
from shapes.case import parse

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compiled import TARGETS, compiled  # noqa: E402

OP = kernels.OPS["fused_moe"]
IMPLEMENTATION = next(i for i in kernels.implementations(OP.name) if i.name == "triton.grouped")

SMALL = "experts=16 topk=4 hidden=256 inter=128"
CASES = [
    (f"tokens=1 {SMALL}", "core"),
    (f"tokens=3 {SMALL} fp8=e4m3fnuz shared=1", "with_routing"),
    (f"tokens=40 {SMALL} routing=one scales=ue8m0", "with_quant"),
    (f"tokens=40 {SMALL} ep=4 routing=uniform", "with_routing"),
    ("tokens=9 experts=20 topk=3 hidden=384 inter=256 shared=1", "with_routing"),
    ("tokens=70 experts=4 topk=2 hidden=1024 inter=128 routing=zipf:1.2", "core"),
]


def sizes_of(text: str) -> Sizes:
    return OP.sizes(parse(text)[0])


def interpret(text: str, boundary: str) -> list[str]:
    """What the judge has against the output: of a first call, and after other live operands were loaded."""
    from harness.check import judge

    sizes = sizes_of(text)
    operands, out = OP.operands(sizes, Seeds(1, 1), "cpu", boundary), OP.empty_output(sizes, "cpu")
    prepared = bind(OP, IMPLEMENTATION, operands, out)
    found = []
    for live in (2, 3):
        other = OP.operands(sizes, Seeds(1, live), "cpu", boundary)
        prepared.load(other.live_tensors())
        out.fill_(float("nan"))
        prepared.call()
        report = judge(prepared.result(), OP.reference(other), OP.tolerance(sizes), None, fp8=True)
        found.append(report["reason"])
    return found


@pytest.fixture(scope="module")
def interpreted() -> list[list[str]]:
    root = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (root, root / "tests")))
    environment = os.environ | INTERPRETER | {"PYTHONPATH": path}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning" not in done.stderr, "computes what it should not:\n" + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[" ".join(case) for case in CASES])
def test_interpreted(interpreted: list[list[str]], index: int) -> None:
    assert interpreted[index] == ["", ""]


def test_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    sizes = sizes_of(CASES[0][0])
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        IMPLEMENTATION.prepare(OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu"))


def test_what_takes_minutes_is_not_interpreted() -> None:
    for text, may in ((SMALL + " tokens=64", True), ("tokens=16", True), ("tokens=256", False)):
        assert IMPLEMENTATION.supports(OP.case(parse(text)[0]), named("cpu")).ok == may, text


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_grids_hold_any_picks(rows: int) -> None:
    for tokens, routing, shared in itertools.product((1, 5, 100), ("balanced", "one", "zipf:1.2"), (0, 1)):
        sizes = sizes_of(f"tokens={tokens} routing={routing} shared={shared}")
        assert sum(-(-load // rows) for load in sizes.routed.loads()) <= provider.tiles_for(rows, sizes)


def on_no_device(text: str, arch: str) -> provider._Grouped:
    """Prepared on torch's meta device: shapes and types without memory."""
    sizes = sizes_of(text)
    operands = OP.empty_operands(sizes, "meta").narrowed().narrowed()
    target = architectures()[arch].target
    return IMPLEMENTATION.prepare_for(target, operands, OP.empty_output(sizes, "meta"))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_workspace_is_a_bound(arch: str) -> None:
    for text in ("tokens=1", "tokens=64", "tokens=4096 ep=8 inter=2048 shared=1", "tokens=300 routing=one"):
        prepared = on_no_device(text, arch)
        taken = sum(
            tensor.nbytes
            for name, tensor in vars(prepared).items()
            if isinstance(tensor, torch.Tensor)
            and name in {"counts", "used", "slots", "owners", "h_q", "h_scale", "given"}
        )
        assert taken <= IMPLEMENTATION.workspace(sizes_of(text)), text


# The FP8 instruction of tiles of 64 rows and more.
INSTRUCTIONS = {
    "gfx942": "v_mfma_f32_16x16x32_fp8_fp8",
    "gfx950": "v_mfma_f32_16x16x128_f8f6f4",
    "sm_90": "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3",
    "sm_100": "tcgen05.mma.cta_group::1.kind::f8f6f4",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "text", ["tokens=64 shared=1", pytest.param("tokens=1024", marks=pytest.mark.slow), "tokens=8192"]
)
def test_compiles(target: str, text: str) -> None:
    found = compiled("fused_moe", target, text)
    assert {"count", "place", "up", "down", "combine", "route", "quantise"} == {
        name.removesuffix("_kernel") for name in found
    }
    for name in ("up_kernel", "down_kernel"):
        if target.startswith("gfx") or "tokens=64" not in text:
            assert INSTRUCTIONS[target] in found[name].instructions, name
        else:
            # Below 64 rows Triton takes the older instruction, which has no FP8 there: exact in fp16.
            assert found[name].instructions == ["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"], name


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(interpret(*case)))
