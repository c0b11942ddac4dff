"""A catalogue put to the judge: who is caught, who is missed, who is accepted, who is refused."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kernels
from harness.errors import UsageError
from harness.prove.planted import Planted
from kernels.operands import Seeds
from shapes.case import parse

CATALOGUES = ("block_scale_gemm", "fused_moe", "mha_prefill", "mla_decode")


@dataclass(frozen=True)
class Proof:
    """What the judge said of a kernel of the catalogue at a size and a seed.

    over:  its error over the limit, the larger of those on ordinary and on adversarial operands; infinite
           where an output is not finite
    refused: whether the judge refused it on one of them
    """

    op: str
    planted: Planted
    size: str
    seed: int
    over: float
    refused: bool

    @property
    def as_it_should(self) -> bool:
        return self.refused != self.planted.right or bool(self.planted.fine)


def catalogue(op: str) -> Any:
    """The module that holds an op's catalogue. Raises UsageError where it has none."""
    if op not in CATALOGUES:
        raise UsageError(f"no catalogue of {op}; there is one of {', '.join(CATALOGUES)}")
    return importlib.import_module(f"harness.prove.{op}")


def prove(
    op: str, seeds: Sequence[int], on_proof: Callable[[Proof], None], device: str = "cpu", size: str = ""
) -> None:
    """Judges all that fits each size; gives each proof as it comes. size: the only one"""
    module = catalogue(op)
    for name, text in module.SIZES.items():
        if size and name != size:
            continue
        for seed in seeds:
            _at(op, module.PLANTED, name, text, seed, device, on_proof)


def _at(
    op: str,
    planted: Sequence[Planted],
    size: str,
    text: str,
    seed: int,
    device: str,
    on_proof: Callable[[Proof], None],
) -> None:
    of = kernels.OPS[op]
    sizes = of.sizes(parse(text)[0])
    fitting = [p for p in planted if p.fits(sizes)]
    proofs: dict[int, Proof] = {}
    for seeds in (Seeds(seed, seed), Seeds(seed + 1, seed + 1, adversarial=True)):
        for boundary in dict.fromkeys(p.boundary for p in fitting):
            operands = of.make(sizes, seeds, device, boundary)
            reference = of.reference(operands)
            right = reference.value.to(of.empty_output(sizes, "meta").dtype)
            for i, each in enumerate(fitting):
                if each.boundary == boundary:
                    over, refused = _judged(each, operands, reference, of.tolerance(sizes), right)
                    proof = Proof(op, each, size, seed, over, refused)
                    before = proofs.get(i, proof)
                    over, refused = max(before.over, proof.over), before.refused or proof.refused
                    proofs[i] = replace(proof, over=over, refused=refused)
    for proof in proofs.values():
        on_proof(proof)


def _judged(
    planted: Planted, operands: Any, reference: Any, tolerance: Any, right: Any
) -> tuple[float, bool]:
    """`over` and `refused` of a proof."""
    from harness.workers.child.judge import judge

    output = planted.compute(operands, right.clone())
    fp8 = planted.activations == "fp8"
    report = judge(output, reference, tolerance, tuple(right.shape), fp8, planted.truncates)
    over = math.inf
    if report["row_error"] is not None:
        over = max(
            report["row_error"] / report["row_limit"], report["element_error"] / report["element_limit"]
        )
    return over, not report["ok"]
