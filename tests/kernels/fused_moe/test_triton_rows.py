"""The Triton kernels around DeepGEMM's products compile for its GPUs, and the memory plan holds what they
need. What they compute is checked in tests/kernels/test_computed_calls.py."""

from __future__ import annotations

from typing import Any

import pytest

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.compiler import compile_launch
from harness.compile.launches import recorded_launches
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.providers import deep_gemm
from kernels.operands import Seeds
from shapes.case import parse

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

OP = kernels.OPS["fused_moe"]
LAYOUTS = {"contiguous": deep_gemm.Contiguous, "masked": deep_gemm.Masked}
KERNELS = {
    "contiguous": ("count", "contiguous", "gather", "silu", "combine"),
    "masked": ("masked", "gather", "silu", "combine"),
}


def on_no_device(layout: str, text: str, packed: bool, patch: pytest.MonkeyPatch) -> Any:
    """Prepared on torch's meta device: shapes and types without memory, launches as on a GPU."""
    patch.setattr(deep_gemm, "alignment", lambda expected: 128)
    patch.setattr(deep_gemm, "setter", lambda aligned: lambda: None)
    patch.setattr(LAYOUTS[layout].Bound, "product", lambda self, a, b, d: lambda: None)
    patch.setattr(deep_gemm, "weight_scale", lambda scale, *rest: scale)
    sizes = OP.sizes(parse(text)[0])

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    fp8, local, hidden, inter = torch.float8_e4m3fn, sizes.local_experts, sizes.hidden, sizes.inter
    operands = FusedMoeOperands(
        w13=empty(local, 2 * inter, hidden, dtype=fp8),
        w13_scale=empty(local, 2 * inter // 128, hidden // 128),
        w2=empty(local, hidden, inter, dtype=fp8),
        w2_scale=empty(local, hidden // 128, inter // 128),
        sizes=sizes,
        seeds=Seeds(),
        x_q=empty(sizes.tokens, hidden, dtype=fp8),
        x_scale=empty(sizes.tokens, hidden // 128),
        topk_ids=empty(sizes.tokens, sizes.picks, dtype=torch.int32),
        topk_weights=empty(sizes.tokens, sizes.picks),
    )
    return LAYOUTS[layout].Bound(operands, OP.empty_output(sizes, "meta"), packed, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_compiles(target: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = target == "sm_100"
    text = f"tokens=64 shared=1 scales={'ue8m0' if packed else 'fp32'}"
    prepared = on_no_device(layout, text, packed, monkeypatch)
    with recorded_launches(architectures()[target]) as calls:
        prepared.call()
    names = [kernel.partition(":")[2].removesuffix("_kernel") for kernel, _ in calls]
    assert set(names) == set(KERNELS[layout])
    for kernel, data in calls:
        figures = compile_launch(kernel, target, data)
        assert (figures.error, figures.scratch_bytes) == ("", 0), kernel


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "text", ["tokens=1", "tokens=64", "tokens=300 routing=one", "tokens=4096 ep=8 inter=2048"]
)
def test_workspace_is_a_bound(layout: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = on_no_device(layout, text, False, monkeypatch)
    given = {id(tensor) for tensor in (prepared.out, *prepared.operands.tensors().values())}
    own = {id(tensor): tensor for tensor in vars(prepared).values() if isinstance(tensor, torch.Tensor)}
    taken = sum(tensor.nbytes for key, tensor in own.items() if key not in given)
    assert taken <= LAYOUTS[layout]().workspace(OP.sizes(parse(text)[0]))
