"""The Triton split-KV kernels: right in the interpreter, and what a configuration asks for.

Whether Triton interprets is settled when it is imported. So the interpreted cases run in one process of
their own: this file, started as a script."""

from typing import Any

import pytest

import kernels
from kernels.formats import FORMATS
from kernels.mla_decode.operands import MlaDecodeSizes
from kernels.mla_decode.triton import split_kv as provider
from kernels.operands import Seeds
from kernels.tuning import Target
from shapes.case import parse
from tests.support.interpreting import each_part, print_found, wrong, wrong_interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


OP = kernels.OPS["mla_decode"]
IMPLEMENTATION = provider.SplitKv()

# Sizes, kind of platform, compute units, for which the plan is made, and the configuration; {}: what
# `heuristic` gives. Parts have 64 tokens at least. Steps of 32 tokens begin inside pages of 48.
RAGGED = "batch=3 ctx=1..200"
STEPS = {"heads": 16, "tokens": 32}
FNUZ = "kv=fp8 fp8=e4m3fnuz"
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("batch=1 ctx=1 page=1", "cpu", 8, {}),
    ("batch=2 ctx=300..400", "cpu", 64, {}),
    ("batch=2 ctx=64 page=64", "cpu", 8, STEPS),
    (f"{RAGGED} page=48 kv=fp8", "cpu", 5, STEPS),
    (f"{RAGGED} heads=1 page=16", "cpu", 8, STEPS),
    (f"{RAGGED} heads=20", "cpu", 3, STEPS),
    (RAGGED, "cuda", 5, STEPS | {"swap": True}),
    (f"{RAGGED} {FNUZ}", "rocm", 5, STEPS | {"reload": True}),
    ("batch=2 ctx=31..65 heads=128 page=16", "rocm", 8, {"heads": 64, "tokens": 16}),
    # Parts of 64 tokens and of one or a few, of which the first query tokens see none.
    ("batch=2 q=4 ctx=66..68 page=16", "cpu", 64, {"heads": 16, "tokens": 64}),
    (f"batch=3 q=3 ctx=3..130 heads=24 {FNUZ}", "cuda", 8, STEPS | {"swap": True}),
    ("batch=3 q=2 ctx=2..66 heads=8 page=1 kv=fp8", "rocm", 8, STEPS),
]
# Slow: further pairings of what the cases above have.
MORE: list[tuple[str, str, int, dict[str, Any]]] = [
    (f"{RAGGED} heads=20", "rocm", 16, STEPS | {"per_unit": 2}),
    ("batch=3 ctx=1..130 heads=128 page=64", "cuda", 8, {"heads": 64, "tokens": 64, "warps": 8}),
    ("batch=2 ctx=31..300 heads=80 kv=fp8", "cuda", 8, {"heads": 64, "tokens": 32, "warps": 8}),
    (f"{RAGGED} page=512", "cpu", 5, STEPS),
    ("batch=3 q=8 ctx=8..200 heads=8", "cuda", 8, {"heads": 64, "tokens": 64, "warps": 8}),
    ("batch=3 q=4 ctx=4..129 heads=16 kv=fp8", "cuda", 8, {"heads": 64, "tokens": 32, "warps": 8}),
]


def sizes_of(text: str) -> MlaDecodeSizes:
    return OP.sizes(parse(text)[0])


def largest(operands: Any) -> None:
    """An FP8 cache of largest values only."""
    codes, most = operands.kv.float(), FORMATS[operands.sizes.fp8].max
    extreme = codes.sign().where(codes != 0, codes.new_ones(())) * most
    operands.kv.copy_(torch.where(codes.isnan(), codes, extreme).to(operands.kv.dtype))


def interpret(text: str, kind: str, units: int, words: dict[str, Any]) -> list[str]:
    sizes = sizes_of(text)
    operands, out = OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu")
    implementation = IMPLEMENTATION.configured(words) if words else IMPLEMENTATION
    prepared = implementation.prepare_for(Target(kind, kind, units), operands, out)
    partial, log_sums = prepared.launches[0].args[4:6]
    poisoned, extreme = (out, partial, log_sums), largest if sizes.kv == "fp8" else None
    return wrong(OP, IMPLEMENTATION, prepared, operands, poisoned, extreme, fp8=False)


@each_part
def test_interpreted(part: str) -> None:
    assert wrong_interpreted(__file__, part) == []


if __name__ == "__main__":
    print_found(interpret, CASES, MORE)
