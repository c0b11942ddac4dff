"""Changes of kernels: as they are written, and what they do to the kernel sums of a load."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from harness.errors import UsageError
from harness.serving.ledger.prediction import KernelChange
from harness.serving.link.load import KernelSums, Phase
from harness.serving.op_classes import OP_CLASSES

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


def name_of(change: KernelChange) -> str:
    return f"{change.op}:{change.part}" if change.part else change.op


def touched(sums: KernelSums, change: KernelChange) -> list[tuple[str, Phase, list[int]]]:
    """(name, phase, terms) that a change touches. Raises UsageError where it touches none."""
    found = []
    for name, phase in (("decode", sums.decode), ("prefill", sums.prefill)):
        if change.phase in ("both", name) and (indices := phase.indices(change.op, change.part)):
            found.append((name, phase, indices))
    if not found:
        names = dict.fromkeys(t.name for p in (sums.decode, sums.prefill) for t in p.terms)
        where = "" if change.phase == "both" else f" of {change.phase}"
        raise UsageError(f"no kernel {name_of(change)!r} in a step{where}; there are: {', '.join(names)}")
    return found


def applied(
    sums: KernelSums, changes: Sequence[KernelChange], in_server: dict[str, float]
) -> tuple[KernelSums, KernelSums, list[str]]:
    """The sums before and after, and what is to be known of that, a line each.

    in_server: by phase, what a kernel's time is multiplied with in the server. A saving in us is of the
    server's own calls already, so that it is divided by that here. A saving of more than nine tenths of what
    the modelled kernel takes cannot be taken from it: then the server before the change was that much slower
    than the model, and the model is what comes after.
    """
    before = after = sums
    notes = []
    for change in changes:
        for name, phase, indices in touched(sums, change):
            if change.factor is not None:
                us = getattr(after, name).us.copy()
                us[indices] /= change.factor
                after = after.having(name, us)
                continue
            calls = change.calls or sum(phase.terms[i].calls for i in indices)
            saved = (change.saved_us or 0.0) * calls / in_server[name]
            slower = saved > 0.9 * float(phase.us[indices].sum(axis=0).min())
            us = getattr(before if slower else after, name).us.copy()
            us[indices] += (saved if slower else -saved) / len(indices)
            if slower:
                before = before.having(name, us)
                notes.append(
                    f"{change.op} in {name}: more is saved than the kernel takes here, so the server before "
                    "was slower than the model by that, and the model is what comes after"
                )
            else:
                after = after.having(name, us)
    return before, after, notes
