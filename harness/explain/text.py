"""The text of an account."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType

from harness.explain import causes
from harness.explain.account import Account
from harness.explain.causes import figure
from harness.report.fitting_table import table_of
from harness.report.text import grouped

HOW = (
    "traces: of SGLang by POST /start_profile with num_steps and record_shapes, of vLLM with "
    "--profiler-config.profiler=torch and POST /start_profile; in an extra launch, not in a measured one"
)


def shown(result: Account) -> RenderableType:
    """The sentence, the sums, the causes with their evidence, and what is not known."""
    parts: list[RenderableType] = [result.says, ""]
    for word, saving in (("expected", result.expected), ("observed", result.observed)):
        parts.append(
            f"{word}: {saving.shown} less of {result.of}: {saving.text}" if saving
            else f"{word}: not known in ms"
        )  # fmt: skip
    if result.seen:
        rows = [_row(result, cause.name, cause.ms, cause.sure) for cause in result.seen]
        if result.rest is not None:
            rows += [_row(result, "rest, unexplained", result.rest), _row(result, "missing", result.missing)]
        parts += ["", table_of(rows), ""]
    for cause in result.seen:
        parts.append(f"{cause.name}: {cause.says}")
        parts += [f"- {line}" for line in cause.evidence]
        parts += [f"- surer with {cause.record}"] if cause.record else []
    return Group(*parts, "", *_others(result))


def _row(result: Account, name: str, ms: float | None, sure: str = "") -> dict[str, object]:
    part = result.share(ms)
    share = "" if part is None else f"{100 * part:.0f} %"
    signed = "not known" if ms is None else f"{'+' if ms >= 0 else ''}{figure(ms)}"
    return {"cause": name, "ms": signed, "share": share, "how sure": sure}


def _others(result: Account) -> Iterator[str]:
    """Causes that were not seen or are not known; what to record only where much is not explained."""
    if unseen := [cause.name for cause in result.causes if cause.sure == "none seen"]:
        yield f"none seen: {', '.join(unseen)}"
    unknown = [cause for cause in result.causes if cause.sure == "not known"]
    if unknown and result.code == 0:
        yield f"not known: {', '.join(cause.name for cause in unknown)}"
    else:
        for record, group in grouped(unknown, lambda cause: cause.record).items():
            yield f"not known: {', '.join(cause.name for cause in group)}; to know it: {record}"
        if any(causes.TRACES in cause.record for cause in unknown):
            yield HOW
    yield from (f"note: {note}" for note in result.notes)
