"""The Triton split-K kernels are right in the interpreter.

As in mla_decode/test_triton.py, the interpreted cases run in a process of their own: this file as a script.
"""

import dataclasses
import itertools
import math
from typing import Any

import pytest

import kernels
from kernels.block_scale_gemm.triton import split_k as provider
from kernels.block_scale_gemm.triton.split_k import MIN_STEPS, SplitKConfig
from kernels.compose import bind
from kernels.formats import FORMATS
from kernels.operands import Seeds
from kernels.triton_runtime import ConfiguredPrepared
from kernels.tuning import Target
from shapes.case import parse
from tests.support.composed import innermost
from tests.support.interpreting import buffers, each_part, print_found, wrong, wrong_interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


OP = kernels.OPS["block_scale_gemm"]
IMPLEMENTATION = provider.SplitK()

# Sizes, boundary, and the arguments of `Forced`. Without fields of a configuration the row chooses its own.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("m=1 n=1 k=1", "core", {}),
    ("m=1 n=130 k=768", "core", {"per_unit": 2}),
    ("m=9 n=150 k=656", "core", {"rows": 16, "swap": True, "tma": True, "sums": "last", "units": 9}),
    ("m=150 n=129 k=656", "core", {"rows": 128, "halves": True, "tma": True, "units": 8, "sums": "last"}),
    ("m=70 n=200 k=200", "core", {"rows": 256, "halves": True, "units": 1}),
    ("m=130 n=260 k=272", "core", {"persistent": True, "tma": True, "units": 4}),
    ("m=40 n=130 k=130", "core", {"rows": 16, "columns": 64, "persistent": True, "units": 5, "dies": 8}),
    ("m=5 n=90 k=640 fp8=e4m3fnuz", "core", {"rows": 16, "columns": 32, "units": 13, "dies": 8}),
    ("m=5 n=160 k=384 fp8=e4m3fnuz scales=ue8m0", "with_quant", {"sums": "last", "units": 3}),
]

# Slow: further combinations of the same.
MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("m=9 n=150 k=768", "core", {"rows": 16, "columns": 64, "swap": True, "sums": "last", "units": 20}),
    ("m=70 n=200 k=300 scales=ue8m0", "with_quant", {"units": 4}),
    ("m=70 n=129 k=640", "core", {"rows": 64, "units": 12, "sums": "last", "dies": 8}),
]


def sizes_of(text: str):
    return OP.sizes(parse(text)[0])


class Forced(provider.SplitK):
    """Has the configuration that the test gives, and a target of so many compute units and dies."""

    def __init__(self, units: int = 64, dies: int = 1, **config: Any) -> None:
        self.target = Target("cpu", "gfx942" if dies > 1 else "cpu", units)
        self.forced = SplitKConfig(**{"rows": 64, "columns": 128, **config}) if config else None

    def prepare_for(self, target: Target, *arguments: Any) -> ConfiguredPrepared:
        return super().prepare_for(self.target, *arguments)


def make_codes_largest(operands: Any) -> None:
    """Makes all codes of b those of the largest magnitude, 0x7F and 0xFF in e4m3fnuz."""
    largest = FORMATS[operands.sizes.fp8].max
    operands.b_q.copy_(torch.where(operands.b_q.float() < 0, -largest, largest))


def interpret(text: str, boundary: str, forced: dict[str, Any]) -> list[str]:
    """What is wrong with the interpreted call; empty if nothing is."""
    sizes = sizes_of(text)
    operands, out = OP.operands(sizes, Seeds(), "cpu", boundary), OP.empty_output(sizes, "cpu")
    prepared = bind(OP, Forced(**forced), operands, out)
    return wrong(OP, IMPLEMENTATION, prepared, operands, buffers(innermost(prepared)), make_codes_largest)


@each_part
def test_interpreted(part: str) -> None:
    assert wrong_interpreted(__file__, part) == []


def test_no_split_is_without_a_block() -> None:
    config = SplitKConfig(64, 128)
    for k, units in itertools.product((1, 128, 1000, 7168, 18432), (1, 60, 132, 608)):
        sizes = sizes_of(f"m=1 n=2112 k={k}")
        splits = config.splits(Target("cuda", "sm_90", units), sizes)
        assert 1 <= splits <= max(1, sizes.k_blocks // MIN_STEPS)
        assert (splits - 1) * math.ceil(sizes.k_blocks / splits) < sizes.k_blocks
    target, sizes = Target("cuda", "sm_90", 132), sizes_of("m=1 n=2112 k=7168")
    assert dataclasses.replace(config, per_unit=2).splits(target, sizes) == 14


if __name__ == "__main__":
    print_found(interpret, CASES, MORE)
