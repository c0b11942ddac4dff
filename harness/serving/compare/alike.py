"""Comparison of two quantities: refused with every reason, or their ratio with all that differs beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from harness.report.text import WIDTH
from harness.serving.compare import identity
from harness.serving.compare.identity import FIELDS, SERVER, UNKNOWN, UP_TO, Difference, all_gpus
from harness.serving.compare.quantity import Quantity, Reason, Side, against, normalised
from harness.serving.compare.settings import beside, server_settings


@dataclass(frozen=True)
class Comparison:
    """Two quantities, compared or refused.

    reasons:   each reason why it is refused; empty where it is not
    a, b:      the numbers as far as they could be normalised, also where it is refused
    differing: what differs and is compared all the same: the hardware, the server's flags ...
    uncertain: what one side or both do not say
    found:     what `serving load` finds in either, except what refuses
    ratio:     a over b; None where it is refused
    """

    verdict: Literal["alike", "normalised", "refused"]
    reasons: tuple[Reason, ...]
    a: Side
    b: Side
    differing: tuple[str, ...]
    uncertain: tuple[str, ...]
    found: tuple[str, ...]
    ratio: float | None


def compare(
    a: Quantity, b: Quantity, assumed: Collection[str] = (), despite: Collection[str] = ()
) -> Comparison:
    """Compares a quantity with another.

    assumed: names of identity fields that are taken to be alike where they are not known; `all`: each.
    despite: names of identity.SERVER that may differ.
    """
    assumed = FIELDS if "all" in assumed else assumed
    (side_a, side_b), reasons = normalised(a, b)
    differing, found = [], []
    unsaid: dict[str, list[str]] = {}
    for each in identity.unlike(identity.of_run(a.run), identity.of_run(b.run)):
        if why := _refusal(each, assumed, despite):
            reasons.append(Reason(each.name, against(each.row, each.run), why))
        elif each.is_known or (each.name in despite and each.row != each.run):
            differing.append(f"{each.name}: {against(each.row, each.run)}")
        else:
            silent = f"{a.run.id} does not say" if each.run else f"{b.run.id} does not say"
            value = f" ({each.row or each.run})" if each.row or each.run else ""
            unsaid.setdefault(silent if value else "neither says", []).append(each.name + value)
    for side, run in (("A", a.run), ("B", b.run)):
        for one in run.findings:
            if one.severity == "wrong":
                reasons.append(Reason(f"numbers of {side}", one.message, "`serving load` finds that wrong"))
            else:
                found.append(f"{side}: {one.severity}: {one.message}")
        found += [f"{side}: {note}" for note in run.notes]
    changed: Literal["alike", "normalised"] = "normalised" if side_a.steps or side_b.steps else "alike"
    return Comparison(
        "refused" if reasons else changed,
        tuple(reasons),
        side_a,
        side_b,
        (*differing, *beside(a.run, b.run)),
        (*(f"{silent} its {', '.join(names)}" for silent, names in unsaid.items()), *_uncertain(a, b)),
        tuple(found),
        None if reasons else side_a.value / side_b.value,
    )


def _refusal(each: Difference, assumed: Collection[str], despite: Collection[str]) -> str:
    """Why a difference refuses the comparison; empty where it does not."""
    field = FIELDS[each.name]
    if each.name in despite:
        return ""
    despite_it = f"; --despite '{each.name}' compares them" if each.name in SERVER else ""
    if each.is_known:
        return field.why and field.why + despite_it
    speculates = each.name == "speculative decoding" and {each.row, each.run} - {"none", UNKNOWN}
    if each.name in assumed or not (field.needed or speculates):
        return ""
    told = "; --engine A=NAME or B=NAME tells it" if each.name == "engine" else despite_it
    return f"what is not known is not alike{told}; --assume '{each.name}' takes it to be alike"


def _uncertain(a: Quantity, b: Quantity) -> Iterator[str]:
    """What is alike only as far as it is known, a line each."""
    of_a, of_b = identity.of_run(a.run), identity.of_run(b.run)
    for name in ("precision", "input length", "output length"):
        one, other = of_a[name], of_b[name]
        is_loose = "fp8" in (one, other) or UP_TO in one + other
        if one and other and one != other and is_loose and FIELDS[name].agree(one, other):
            yield f"{name}: {against(one, other)}"
    silent = [quantity.run.id for quantity in (a, b) if not server_settings(quantity.run)]
    if len(silent) == 1:
        yield f"{silent[0]} does not say its server's flags"
    for quantity in (a, b):
        if identity.is_trimmed(quantity.run):
            yield f"{quantity.run.id} counts a trimmed window, which is the steady state at its best"
    gpus = all_gpus(a.run), all_gpus(b.run)
    each = a.run.workload.concurrency
    if each and each == b.run.workload.concurrency and gpus[0] and gpus[1] and gpus[0] != gpus[1]:
        yield f"the same requests in flight are {each / gpus[0]:g} a GPU against {each / gpus[1]:g}"


def as_text(a: Quantity, b: Quantity, comparison: Comparison) -> str:
    """Both numbers, normalised where they can be, and their ratio; or why they are not compared."""
    lines = []
    for name, quantity, side in (("A", a, comparison.a), ("B", b, comparison.b)):
        m, run = quantity.metric, quantity.run
        kind = "" if m.tokens == "none" else f" of {m.tokens} tokens"
        statistic = "" if m.statistic == "total" else f"{m.statistic} "
        gpus = f"{all_gpus(run)} " if all_gpus(run) else ""
        about = (f"{gpus}{run.hardware or 'unknown hardware'}", run.engine or "unknown engine", run.version)
        lines.append(f"{name}  {run.id}: {' '.join(filter(None, about))}")
        lines.append(f"   {statistic}{m.name}{kind}: {m.value:,.6g} {m.unit}, scope {m.scope}")
        if side.steps:
            of = f" {side.tokens}" if side.tokens not in ("none", "unknown") else ""
            number = f"{side.value:,.6g}{of} {side.unit}" + (" a GPU" if side.scope == "gpu" else "")
            lines.append(f"   normalised: {number}  ({'; '.join(side.steps)})")
    after = " after normalising" if comparison.verdict == "normalised" else ""
    lines += [] if comparison.ratio is None else [f"A / B = {comparison.ratio:.4g}{after}"]
    for title, texts in (
        ("not alike, so not compared:", [reason.text for reason in comparison.reasons]),
        ("what differs:", comparison.differing),
        ("uncertain:", comparison.uncertain),
        ("found by `serving load`:", comparison.found),
    ):
        wrapped = [textwrap.fill(t, WIDTH, initial_indent="  ", subsequent_indent="    ") for t in texts]
        lines += [title, *wrapped] if texts else []
    return "\n".join(lines)
