"""Comparison of two quantities: refused with every reason, or their ratio with all that differs beside it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from harness.report.text import WIDTH
from harness.serving.compare import identity
from harness.serving.compare.identity import FIELDS, SERVER, UNKNOWN, UP_TO, Difference, all_gpus, is_assumed
from harness.serving.compare.quantity import Quantity, Reason, Side, against, normalised, unit_of
from harness.serving.schema import Metric, ServingRun

ComparisonVerdict = Literal["alike", "normalised", "refused"]


@dataclass(frozen=True)
class QuantityComparison:
    """Two quantities.

    reasons:   why it is refused, each of them; empty where it is not
    a, b:      the numbers as far as they could be normalised, also where it is refused
    differing: what differs and does not refuse: the hardware, the server's flags ...
    uncertain: what is not known of one side or of both
    found:     what `serving load` finds in either, but what refuses
    """

    verdict: ComparisonVerdict
    reasons: tuple[Reason, ...]
    a: Side
    b: Side
    differing: tuple[str, ...]
    uncertain: tuple[str, ...]
    found: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """a over b; None where it is refused."""
        return self.a.value / self.b.value if self.verdict != "refused" and self.b.value else None


def require_options(assumed: Collection[str], despite: Collection[str]) -> None:
    """Raises UsageError for a name that `compare` does not take."""
    identity.require_names("--assume", assumed, ("all", *FIELDS))
    identity.require_names("--despite", despite, SERVER)


def compare(
    a: Quantity, b: Quantity, assumed: Collection[str] = (), despite: Collection[str] = ()
) -> QuantityComparison:
    """Compares a quantity with another.

    assumed: names of identity fields that are taken to be alike where they are not known; `all`: each.
    despite: names of identity.SERVER that are compared although they differ.
    """
    reasons, differing = list(metric_reasons(a.metric, b.metric)), []
    unsaid: dict[str, list[str]] = {}
    for each in identity.unlike(identity.of_run(a.run), identity.of_run(b.run)):
        if why := _refusal(each, assumed, despite):
            reasons.append(Reason(each.name, against(each.row, each.run), why))
        elif each.is_known or each.name in despite:
            differing.append(f"{each.name}: {against(each.row, each.run)}")
        else:
            who = a.run.id if each.run else b.run.id if each.row else "neither"
            value = f" ({each.row or each.run})" if each.row or each.run else ""
            unsaid.setdefault(who, []).append(each.name + value)
    uncertain = [
        f"{'neither says' if who == 'neither' else f'{who} does not say'} its {', '.join(names)}"
        for who, names in unsaid.items()
    ]
    reasons += [
        Reason(f"numbers of {side}", finding.message, "`serving load` finds that wrong")
        for side, quantity in (("A", a), ("B", b))
        for finding in quantity.run.findings
        if finding.severity == "wrong"
    ]
    (side_a, side_b), unmended = normalised(a, b)
    reasons += unmended
    verdict: ComparisonVerdict = "normalised" if side_a.steps or side_b.steps else "alike"
    return QuantityComparison(
        "refused" if reasons else verdict,
        tuple(reasons),
        side_a,
        side_b,
        (*differing, *identity.beside(a.run, b.run)),
        (*uncertain, *_uncertain(a, b)),
        tuple(_found(a.run, b.run)),
    )


def metric_reasons(a: Metric, b: Metric) -> Iterator[Reason]:
    """Why two metrics are not of one kind."""
    for aspect, of_a, of_b, why in (
        ("metric", a.name, b.name, "they are different quantities"),
        ("statistic", a.statistic, b.statistic, "one does not give the other"),
        ("unit", unit_of(a)[1], unit_of(b)[1], "there is no factor between them"),
    ):
        if of_a != of_b:
            yield Reason(aspect, against(of_a, of_b), why)
    if not a.value or not b.value:
        yield Reason("value", against(f"{a.value:g}", f"{b.value:g}"), "0 is nothing that was measured")


def _refusal(each: Difference, assumed: Collection[str], despite: Collection[str]) -> str:
    """Why a difference refuses the comparison; empty where it does not."""
    field = FIELDS[each.name]
    if each.name in despite:
        return ""
    despite_it = f"; --despite '{each.name}' compares them" if each.name in SERVER else ""
    if each.is_known:
        return field.why and field.why + despite_it
    speculates = each.name == "speculative decoding" and {each.row, each.run} - {"none", UNKNOWN}
    if is_assumed(each.name, assumed) or not (field.needed or speculates):
        return ""
    told = "; --engine A=NAME or B=NAME tells it" if each.name == "engine" else despite_it
    return f"what is not known is not alike{told}; --assume '{each.name}' takes it to be alike"


def _uncertain(a: Quantity, b: Quantity) -> Iterator[str]:
    of_a, of_b = identity.of_run(a.run), identity.of_run(b.run)
    for name in ("precision", "input length", "output length"):
        values = of_a[name], of_b[name]
        is_loose = "fp8" in values or UP_TO in "".join(values)
        if UNKNOWN not in values and values[0] != values[1] and is_loose and FIELDS[name].agree(*values):
            yield f"{name}: {against(*values)}"
    told = [bool(identity.server_settings(quantity.run)) for quantity in (a, b)]
    if told[0] != told[1]:
        yield f"{(a, b)[told[0]].run.id} does not say its server's flags"
    for quantity in (a, b):
        if identity.is_trimmed(quantity.run):
            yield f"{quantity.run.id} counts a trimmed window, which is the steady state at its best"
    gpus = all_gpus(a.run), all_gpus(b.run)
    each = a.run.workload.concurrency
    if each and each == b.run.workload.concurrency and gpus[0] and gpus[1] and gpus[0] != gpus[1]:
        per = [f"{each / number:g}" for number in gpus if number]
        yield f"the same requests in flight are {per[0]} a GPU against {per[1]}"


def _found(a: ServingRun, b: ServingRun) -> Iterator[str]:
    for side, run in (("A", a), ("B", b)):
        yield from (f"{side}: {f.severity}: {f.message}" for f in run.findings if f.severity != "wrong")
        yield from (f"{side}: {note}" for note in run.notes)


def as_json(comparison: QuantityComparison) -> str:
    return json.dumps({**asdict(comparison), "ratio": comparison.ratio}, indent=1) + "\n"


def as_text(a: Quantity, b: Quantity, comparison: QuantityComparison) -> str:
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
            lines.append(f"   normalised: {side.text}  ({'; '.join(side.steps)})")
    if comparison.ratio is None:
        lines += ["not alike, so not compared:", *_wrapped([reason.text for reason in comparison.reasons])]
    else:
        lines.append(
            f"A / B = {comparison.ratio:.4g}"
            + (" after normalising" if comparison.verdict == "normalised" else "")
        )
    for title, texts in (
        ("what differs:", comparison.differing),
        ("uncertain:", comparison.uncertain),
        ("found by `serving load`:", comparison.found),
    ):
        lines += [title, *_wrapped(texts)] if texts else []
    return "\n".join(lines)


def _wrapped(texts: Collection[str]) -> list[str]:
    return [textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ") for text in texts]
