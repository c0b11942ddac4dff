"""What ops, implementations and configurations say of a case before it runs, in `figures/<op>.txt`: work,
bytes, limits, reasons, and what the suite's own kernels choose. A wrong factor in a plan shows in a line."""

import functools
from collections import Counter
from pathlib import Path

import pytest

import kernels
from harness.catalogue.architectures import architectures
from kernels.engine_tuning import EngineTuned
from kernels.op import Implementation, Op
from kernels.platform import version
from kernels.tuning import Tunable, words
from shapes.suites import suite

pytestmark = pytest.mark.skipif(
    not version("torch") or not version("triton"), reason="needs torch and Triton"
)
OTHERS = ("sm_103", "sm_120", "x86-amx")  # architectures that are not compiled for


UNUSUAL = {"block_scale_gemm": {"n": 129}, "fused_moe": {"scales": "ue8m0"},
           "mla_decode": {"kv": "fp8", "model_len": 120}, "mha_prefill": {"dtype": "fp8"}}  # fmt: skip
"""By op, sizes that no case of the suites has."""


def cases(op: str) -> list[dict]:
    """Sizes: those of the suite `smoke`, a few spread over each of two deployments, and unusual ones."""
    smoke, tp8, ep8 = (suite(name).cases(op) for name in ("smoke", "r1-tp8", "r1-dp-ep8"))
    usual = [c.sizes for c in [*smoke, *tp8[:: len(tp8) // 5], *ep8[:: max(1, len(ep8) // 3)]]]
    return [*usual, usual[0] | UNUSUAL[op]]


def of_op(op: Op, sizes: object) -> list[str]:
    """Lines of what the op says of these sizes."""
    work = {boundary: op.work(sizes, boundary) for boundary in op.boundaries}
    taken = {name: getattr(op, f"{name}_bytes")(sizes) for name in
             ("operand", "narrowed", "output", "reference", "streamed", "turn")}  # fmt: skip
    return [
        *(f"{b}: {w.flops:.6g} flops, {w.bytes:.9g} bytes, {w.dtype}" for b, w in work.items()),
        "bytes: " + " ".join(f"{name}={value:.9g}" for name, value in taken.items()),
        f"in 3 turns: {op.streamed_bytes(sizes, 3):.9g} bytes",
        str(op.tolerance(sizes)),
    ]


def of_row(row: Implementation, sizes: object) -> str:
    """A line of what an implementation says of these sizes."""
    fits = row.fits(sizes)
    if not fits.ok:
        return f"{row.name}: {fits.reason}"
    names = ("layout", "workspace", "scratch", "interpreted_s")
    figures = {name: getattr(row, name)(sizes) for name in names}
    return f"{row.name}: " + (" ".join(f"{n}={v:.9g}" for n, v in figures.items() if v) or "fits")


said = functools.cache(words)
"""Of a configuration, which several architectures have."""


def of_choice(row: Tunable, sizes: object) -> list[str]:
    """Features; by each architecture how many configurations have which value, and the choice by rule."""
    lines = [f"{row.name}: {row.features(sizes)}"]
    for arch, architecture in architectures().items():
        target = architecture.target
        configs = list(row.configurations(target, sizes))
        values = Counter(word for config in configs for word in said(config).split())
        lines += [
            f"{row.name} {arch} {len(configs)}: " + " ".join(f"{w}:{n}" for w, n in sorted(values.items()))
        ]
        if isinstance(row, EngineTuned):  # its engine chooses
            chosen = configs[0]
        else:
            chosen = row.heuristic(target, sizes)
        lines += [f"  {words(chosen)}"]
    return lines


@pytest.mark.parametrize("name", kernels.OPS)
def test_what_is_said_of_a_case(snapshot, name):
    op = kernels.OPS[name]
    facts = ("boundaries", "baseline", "engine_like", "lengths", "turns", "axes", "unsaid")
    lines = [f"{fact}: {getattr(op, fact)}" for fact in facts]
    lines += [f"{arch}: {dict(op.defaults(arch))}" for arch in (*architectures(), *OTHERS)]
    for given in cases(name):
        sizes = op.sizes(given)
        lines += ["", " ".join(f"{n}={v}" for n, v in op.case_sizes(sizes).items()), *of_op(op, sizes)]
        rows = kernels.implementations(name)
        lines += [of_row(row, sizes) for row in rows]
        for row in rows:
            if isinstance(row, Tunable) and row.fits(sizes).ok:
                lines += of_choice(row, sizes)
    snapshot(Path(__file__).parent / "figures" / f"{name}.txt", "\n".join(lines) + "\n")
