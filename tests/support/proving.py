"""Runs a catalogue of right and wrong kernels (harness/prove) against the judge."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import kernels
from harness.prove.planted import Planted
from harness.workers.child.judge import judge
from kernels.op import Op
from kernels.operands import Seeds
from shapes.case import parse


@functools.lru_cache(maxsize=2)
def problems(op: str, text: str, seed: int, boundary: str = "core") -> list[tuple[Any, Any, Any]]:
    """Ordinary operands and adversarial ones, each with its reference and a right output."""
    of = kernels.OPS[op]
    sizes = of.sizes(parse(text)[0])
    made = []
    for seeds in (Seeds(seed, seed), Seeds(seed + 1, seed + 1, adversarial=True)):
        operands = of.operands(sizes, seeds, "cpu", boundary)
        reference = of.reference(operands)
        made.append((operands, reference, reference.value.bfloat16()))
    return made


def reports(of: Op, planted: Planted, text: str, seed: int) -> Iterator[dict[str, Any]]:
    """The judge's word on its outputs, one after the other."""
    sizes = of.sizes(parse(text)[0])
    shape, tolerance = tuple(of.empty_output(sizes, "meta").shape), of.tolerance(sizes)
    for operands, reference, right in problems(of.name, text, seed, planted.boundary):
        output = planted.compute(operands, right)
        yield judge(output, reference, tolerance, shape, planted.activations == "fp8", planted.truncates)


def fitting(of: Op, catalogue: Sequence[Planted], text: str, right: bool) -> list[Planted]:
    sizes = of.sizes(parse(text)[0])
    return [p for p in catalogue if p.right == right and not p.fine and p.fits(sizes)]


def closeness(report: dict[str, Any]) -> float:
    """The largest error, as a share of its limit."""
    shares = [
        report[f"{name}_error"] / report[f"{name}_limit"]
        for name in ("row", "element")
        if report[f"{name}_error"] is not None
    ]
    return max(shares, default=float("inf")) if report["ok"] else float("inf")


def check_right(of: Op, catalogue: Sequence[Planted], text: str, seed: int, most: float = 0.9) -> None:
    """Every right kernel is accepted, with a tenth of the limit to spare; prints the nearest (pytest -s)."""
    near = {
        p.name: max(closeness(report) for report in reports(of, p, text, seed))
        for p in fitting(of, catalogue, text, right=True)
    }
    worst = max(near, key=near.__getitem__)
    print(f"{text}, seed {seed}: {len(near)} right, the nearest to a limit {near[worst]:.3g}: {worst}")
    assert not {name: share for name, share in near.items() if share > most}


def check_bugs(of: Op, catalogue: Sequence[Planted], text: str, seed: int) -> None:
    """Every bug is refused on ordinary operands or on adversarial ones."""
    chosen = fitting(of, catalogue, text, right=False)
    missed = [p.name for p in chosen if all(report["ok"] for report in reports(of, p, text, seed))]
    print(f"{text}, seed {seed}: {len(chosen)} bugs, {len(missed)} missed")
    assert not missed


DRAWN = "a0a6e0408b3096d3"
"""Of 1000 numbers that torch draws from seed 0, in fp32 and in bf16."""


def _sha(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def same_digits(op: str, text: str, digest: str) -> None:
    """Operands of the seeds (3, 5) have these bits, if torch draws here what it drew there: its numbers
    differ by instruction set in the last place."""
    drawn = [
        torch.empty(1000, dtype=dtype).normal_(generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    if _sha(*drawn) != DRAWN:
        pytest.skip("torch draws other numbers on this CPU")
    of = kernels.OPS[op]
    operands = of.operands(of.sizes(parse(text)[0]), Seeds(3, 5), "cpu")
    assert _sha(*operands.tensors().values()) == digest
