"""Changes of kernels: as they are written, and what they do to a step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from harness.errors import UsageError
from harness.serving.ledger.prediction import KernelChange
from harness.serving.link.step_times import Draws, PhaseTimes, StepTimes
from harness.serving.link.uncertainty import IN_SERVER, World
from harness.serving.op_classes import OP_CLASSES

NORMAL_90 = 1.6449  # deviations to either side
FORM = "OP[:PART][@decode|@prefill]=FACTORx[(LOW..HIGH)] or ...=saved:TIMEus[(LOW..HIGH)]"
_NUMBER = r"[0-9]*\.?[0-9]+(?:e[0-9]+)?"
_CHANGE = re.compile(
    rf"(?P<op>\w+)(?::(?P<part>[\w.]+))?(?:@(?P<phase>decode|prefill))?="
    rf"(?:(?P<factor>{_NUMBER})x|saved:(?P<saved>{_NUMBER})us)"
    rf"(?:\((?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})(?:x|us)?\))?"
)


def parse_change(text: str) -> KernelChange:
    """`mla_decode=2.0x`, `fused_moe=1.3x(1.2..1.4)`, `block_scale_gemm:qkv_a@decode=saved:5us`. Raises
    UsageError."""
    match = _CHANGE.fullmatch(text.replace(" ", ""))
    if not match:
        raise UsageError(f"cannot read change {text!r}; write {FORM}")
    if match["op"] not in OP_CLASSES:
        raise UsageError(f"unknown op {match['op']!r} in {text!r}; ops: {', '.join(OP_CLASSES)}")
    phase: Literal["decode", "prefill", "both"] = (
        "decode" if match["phase"] == "decode" else "prefill" if match["phase"] else "both"
    )
    value = float(match["factor"] or match["saved"])
    low, high = (float(match[k]) if match[k] else None for k in ("low", "high"))
    holds = low is None or high is None or 0 < low <= value <= high < math.inf
    if not 0 < value < math.inf or not holds:
        raise UsageError(
            f"cannot read change {text!r}: its value is to be positive and finite, its interval to hold it"
        )
    return KernelChange(
        op=match["op"],
        part=match["part"] or "",
        factor=value if match["factor"] else None,
        saved_us=value if match["saved"] else None,
        low=low,
        high=high,
        phase=phase,
    )


def phases(steps: StepTimes, change: KernelChange) -> list[tuple[str, PhaseTimes, list[int]]]:
    """(name, phase, terms) that a change touches. Raises UsageError where it touches none."""
    touched = []
    for name, phase in (("decode", steps.decode), ("prefill", steps.prefill)):
        if change.phase in ("both", name) and (indices := phase.indices(change.op, change.part)):
            touched.append((name, phase, indices))
    if not touched:
        names = dict.fromkeys(t.name for p in (steps.decode, steps.prefill) for t in p.terms)
        where = "" if change.phase == "both" else f" of {change.phase}"
        wanted = f"{change.op}:{change.part}" if change.part else change.op
        raise UsageError(f"no kernel {wanted!r} in a step{where}; there are: {', '.join(names)}")
    return touched


def applied(
    steps: StepTimes, draws: Draws, changes: Sequence[KernelChange], world: World
) -> tuple[Draws, Draws]:
    """The draws before and after.

    A saving that is more than the modelled kernel takes cannot be taken from it: then the server before the
    change was that much slower than the model, and the model is what comes after.
    """
    before, after = draws, draws
    for number, change in enumerate(changes):
        change_z = world.normal("kernel change", str(number))
        server = 1 + IN_SERVER * world.normal("kernel in the server", str(number))
        for name, phase, indices in phases(steps, change):
            if change.factor is not None:
                factor = change.factor * np.exp(_spread(change) * change_z)
                kept = np.maximum(1 - (1 - 1 / factor) * server, 0.0)
                columns = getattr(after, name).copy()
                columns[:, indices] *= kept[:, None]
                after = replace(after, **{name: columns})
                continue
            saved = (change.saved_us or 0.0) * np.exp(_spread(change) * change_z) * server
            calls_of_terms = sum(phase.terms[i].calls for i in indices)
            calls = change.calls or calls_of_terms
            us = saved * calls * world.exposed(name, change.op)
            key = f"{name}_us"
            if slower_before(phase, indices, change):
                before = replace(before, **{key: getattr(before, key) + us})
            else:
                after = replace(after, **{key: getattr(after, key) - us})
    return before, after


def slower_before(phase: PhaseTimes, indices: Sequence[int], change: KernelChange) -> bool:
    """Whether a saving is more than nine tenths of the least that the modelled kernels take."""
    calls = sum(phase.terms[i].calls for i in indices)
    least = float(phase.us[indices].sum(axis=0).min()) / calls
    return change.saved_us is not None and change.saved_us * (change.calls or calls) / calls > 0.9 * least


def _spread(change: KernelChange) -> float:
    """Deviation of the logarithm, of its 90 % interval."""
    if change.low is None or change.high is None:
        return 0.0
    return math.log(change.high / change.low) / 2 / NORMAL_90
