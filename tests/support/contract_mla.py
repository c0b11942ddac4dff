"""What each adapter of MLA decode is tried on: an architecture, a double of its library, and cases."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import kernels
from harness.workers.child.judge import judge
from kernels.op import Implementation, Reference
from kernels.operands import Seeds
from kernels.platform import Platform
from shapes.case import parse

OP = kernels.OPS["mla_decode"]
RAGGED = "batch=3 ctx=1..130"


@dataclass(frozen=True)
class Contract:
    """An adapter on an architecture, with the double of its library."""

    name: str
    kind: str
    arch: str
    double: str
    texts: tuple[str, ...]

    @property
    def implementation(self) -> Implementation:
        return next(i for i in kernels.implementations("mla_decode") if i.name == self.name)


CONTRACTS = (
    *(
        Contract("aiter.asm", "rocm", arch, "aiter_attention", texts)
        for arch, fp8 in (("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn"))
        for texts in [
            (
                f"{RAGGED} page=1",
                f"{RAGGED} page=16",
                "batch=2 ctx=1..130 heads=128 page=64",
                f"{RAGGED} page=64 kv=fp8 fp8={fp8}",
                f"batch=2 ctx=1..130 heads=128 page=16 kv=fp8 fp8={fp8}",
            )
        ]
    ),
    *(
        Contract("aiter.asm_persistent", "rocm", arch, "aiter_attention", texts)
        for arch, fp8 in (("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn"))
        for texts in [
            (
                f"{RAGGED} page=16",
                "batch=2 ctx=1..130 heads=128 page=64",
                f"{RAGGED} page=1 kv=fp8 fp8={fp8}",
                f"batch=1 ctx=130 heads=64 page=64 kv=fp8 fp8={fp8}",
                f"batch=2 ctx=1..130 heads=128 page=16 kv=fp8 fp8={fp8}",
            )
        ]
    ),
    Contract(
        "aiter.triton",
        "rocm",
        "gfx942",
        "aiter_attention",
        (f"{RAGGED} page=16", f"{RAGGED} heads=128 page=64", f"{RAGGED} page=64 kv=fp8 fp8=e4m3fnuz"),
    ),
    Contract(
        "aiter.triton_split",
        "rocm",
        "gfx942",
        "aiter_attention",
        (f"{RAGGED} page=1", f"{RAGGED} heads=128 page=64", f"{RAGGED} page=16 kv=fp8 fp8=e4m3fnuz"),
    ),
    *(
        Contract(
            "flashmla",
            "cuda",
            "sm_90",
            double,
            (f"{RAGGED} page=64", "batch=2 ctx=1..130 heads=128 page=128"),
        )
        for double in ("flash_mla", "flash_mla_2025")
    ),
    *(
        Contract(
            name,
            "cuda",
            "sm_90",
            "flashinfer_attention",
            (
                f"{RAGGED} page=1",
                f"{RAGGED} page=16",
                f"{RAGGED} heads=128 page=64",
                f"{RAGGED} page=64 kv=fp8",
            ),
        )
        for name in ("flashinfer.fa2", "flashinfer.fa3")
    ),
    Contract(
        "flashinfer.cutlass",
        "cuda",
        "sm_100",
        "flashinfer_attention",
        ("batch=3 ctx=1..130 heads=128 page=64", "batch=2 ctx=100..300 heads=128 page=16"),
    ),
    Contract(
        "flashinfer.trtllm",
        "cuda",
        "sm_100",
        "flashinfer_attention",
        (f"{RAGGED} page=64", f"{RAGGED} heads=128 page=32", f"{RAGGED} page=64 kv=fp8"),
    ),
    Contract(
        "flash_attn.fa3",
        "cuda",
        "sm_90",
        "flash_attn_3",
        (f"{RAGGED} page=1", f"{RAGGED} page=16", f"{RAGGED} heads=128 page=64"),
    ),
    Contract(
        "flash_attn.fa4",
        "cuda",
        "sm_100",
        "flash_attn_4",
        (f"{RAGGED} page=16", f"{RAGGED} heads=128 page=64"),
    ),
    *(
        Contract(
            "sglang.triton",
            kind,
            arch,
            "sglang",
            (
                f"{RAGGED} page=1",
                f"{RAGGED} heads=128 page=64",
                f"batch=2 ctx=100..700 page=16 kv=fp8 fp8={fp8}",
            ),
        )
        for kind, arch, fp8 in (("cuda", "sm_90", "e4m3fn"), ("rocm", "gfx942", "e4m3fnuz"))
    ),
)


@functools.cache
def reference(text: str, live: int) -> Reference:
    return OP.reference(OP.operands(sizes_of(text), Seeds(live=live), "cpu"))


def sizes_of(text: str) -> Any:
    return OP.sizes(parse(text)[0])


def reports(contract: Contract, text: str, here: Platform) -> Iterator[dict]:
    """The judge's, of a first call and of one after other live operands were loaded."""
    implementation, sizes = contract.implementation, sizes_of(text)
    support = implementation.supports(OP.case(parse(text)[0]), here)
    assert support.ok, support.reason
    operands = OP.operands(sizes, Seeds(), "cpu")
    out = None if implementation.allocates else OP.empty_output(sizes, "cpu").fill_(torch.nan)
    prepared = implementation.prepare(operands, out)
    for live in (0, 1):
        prepared.load(OP.operands(sizes, Seeds(live=live), "cpu").live_tensors())
        if out is not None:
            out.fill_(torch.nan)
        before = operands.digest()
        prepared.call()
        assert operands.digest() == before
        shape = tuple(OP.empty_output(sizes, "meta").shape)
        fp8 = implementation.activations == "fp8"
        yield judge(prepared.result(), reference(text, live), OP.tolerance(sizes), shape, fp8)
