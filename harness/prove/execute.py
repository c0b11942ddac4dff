"""A catalogue put to the judge: who is caught, who is missed, who is accepted, who is refused."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kernels
from harness.errors import HarnessError, UsageError
from harness.paths import ROOT
from harness.prove.planted import Planted
from kernels.operands import Seeds
from shapes.case import parse

CATALOGUES = ("block_scale_gemm", "fused_moe", "mha_prefill", "mla_decode")


@dataclass(frozen=True)
class Proof:
    """What the judge said of a kernel of the catalogue at a size and a seed.

    over:  its error over the limit, the larger of those on ordinary and on adversarial operands; infinite
           where an output is not finite
    found: whether the judge refused it on one of them
    """

    op: str
    planted: Planted
    size: str
    seed: int
    over: float
    found: bool

    @property
    def as_it_should(self) -> bool:
        return self.found != self.planted.right or bool(self.planted.fine)


CHEATED = {
    "block_scale_gemm": {"small": "m=16 n=512 k=512", "middle": "m=64 n=2112 k=7168"},
    "fused_moe": {
        "small": "tokens=16 experts=16 topk=4 hidden=256 inter=128",
        "middle": "tokens=32 experts=16 topk=4 hidden=1024 inter=512",
    },
    "mha_prefill": {"small": "batch=2 new=60..100 heads=4", "middle": "batch=2 new=300..500 heads=8"},
    "mla_decode": {"small": "batch=2 ctx=40..150 page=16", "middle": "batch=8 ctx=500..1500 page=64"},
}
"""The cases of each op on which cheats run."""


@dataclass(frozen=True)
class CheatRow:
    """A row of a real run, of a cheat or of the right kernel that all cheats are made of.

    status, reason: as of a cell
    """

    op: str
    name: str
    size: str
    status: str
    reason: str

    @property
    def cheats(self) -> bool:
        return self.name.startswith("cheat.")

    @property
    def as_it_should(self) -> bool:
        return self.status == ("wrong" if self.cheats else "ok")


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
                    over, found = _judged(each, operands, reference, of.tolerance(sizes), right)
                    proof = Proof(op, each, size, seed, over, found)
                    before = proofs.get(i, proof)
                    over, found = max(before.over, proof.over), before.found or proof.found
                    proofs[i] = replace(proof, over=over, found=found)
    for proof in proofs.values():
        on_proof(proof)


def _judged(
    planted: Planted, operands: Any, reference: Any, tolerance: Any, right: Any
) -> tuple[float, bool]:
    """`over` and `found` of a proof."""
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


def cheat(
    op: str,
    on_row: Callable[[CheatRow], None],
    device: str | None = None,
    size: str = "",
    budget: str = "20s",
) -> None:
    """Runs the cheats of harness/prove/cheats.py beside the right kernel, as a user would run a plug-in;
    gives their rows. size: the only one. Raises HarnessError where a run gives none."""
    from harness.prove.cheats import HONEST

    for name, case in CHEATED[op].items():
        if size and name != size:
            continue
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
            command = ["--op", op, "--case", case, "--impl", f"cheat.*,{HONEST[op]}", "--budget", budget]
            command += ["--device", device] if device else []
            command += ["--out", f"{folder}/run", "--json", "-", "--quiet"]
            done = subprocess.run(
                [sys.executable, "-m", "harness", "run", *command],
                env={**os.environ, kernels.PLUGINS: str(Path(__file__).with_name("cheats.py"))},
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
        if not done.stdout:
            raise HarnessError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
        for cell in json.loads(done.stdout)["cells"]:
            on_row(CheatRow(op, cell["impl"], name, cell["status"], cell["reason"]))
