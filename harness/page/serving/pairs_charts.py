"""Chart of the pairs of live runs: each run of the base beside its arm's, and the runs that do not count."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.page.serving.colours import AFTER, BEFORE
from harness.page.serving.marks import LABEL, records
from harness.serving.live.ab.pairs import counted

if TYPE_CHECKING:
    import altair

QUANTITIES = {"steady_itl_ms": "itl", "mean_ttft_ms": "ttft", "mean_tpot_ms": "tpot"}
"""Of a run's means those that a ledger observes, by their names there."""
REJECTED = "#D55E00"
PANEL = 170  # pixels of one quantity's plot


@dataclass(frozen=True)
class PairedRuns:
    """Runs of one pair that belong together: those that count, or those of one attempt that do not.

    values: quantity -> (base, arm) in ms, None where a run has none
    reason: why they do not count; empty: they do
    """

    label: str
    values: dict[str, tuple[float | None, float | None]]
    reason: str

    def both(self, quantity: str) -> bool:
        return None not in self.values[quantity]


def paired_runs(lines: Sequence[Mapping[str, Any]], base: str, arm: str) -> list[PairedRuns]:
    """In the order of the pairs; of each the runs that count first."""
    of_both = [line for line in lines if line["kind"] == "run" and line["arm"] in (base, arm)]
    kept = {(run["pair"], run["arm"], run["attempt"]) for run in counted(lines)}
    groups: dict[tuple[int, bool, int], dict[str, Mapping[str, Any]]] = {}
    for run in of_both:
        lost = (run["pair"], run["arm"], run["attempt"]) not in kept
        key = (run["pair"], lost, run["attempt"] if lost else 0)
        groups.setdefault(key, {})[run["arm"]] = run
    return [
        PairedRuns(
            label=f"pair {pair + 1}" + (f", attempt {attempt + 1}" if lost else ""),
            values={name: (_value(runs.get(base), name), _value(runs.get(arm), name)) for name in QUANTITIES},
            reason=_reason(runs.values()) if lost else "",
        )
        for (pair, lost, attempt), runs in sorted(groups.items(), key=lambda group: group[0])
    ]


def _value(run: Mapping[str, Any] | None, quantity: str) -> float | None:
    value = None if run is None else run.get(quantity)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _reason(runs: Any) -> str:
    reasons = dict.fromkeys(str(reason) for run in runs for reason in run.get("reasons", ()))
    return "; ".join(reasons) or "its pair was not finished"


def measured(pairs: Sequence[PairedRuns]) -> list[str]:
    """Quantities that a run has."""
    return [name for name in QUANTITIES if any(p.values[name] != (None, None) for p in pairs)]


def run_marks(pairs: Sequence[PairedRuns], quantity: str, base: str, arm: str) -> Iterator[dict[str, Any]]:
    """A mark for each run, with the number of the run that it is paired with."""
    for order, pair in enumerate(pairs):
        before, after = pair.values[quantity]
        for name, value in ((base, before), (arm, after)):
            if value is not None:
                change = "" if before is None or after is None else f"{after - before:+.5g}"
                yield {
                    "pair": pair.label,
                    "order": order,
                    "arm": name,
                    "value": value,
                    "before": before,
                    "after": after,
                    "change": change,
                    "counts": not pair.reason,
                    "connected": pair.both(quantity) and name == base,
                    "reason": pair.reason or "counts",
                    "aria": f"{pair.label}, {name}: {value:.5g} ms, {pair.reason or 'counts'}",
                }


def pairs_chart(pairs: Sequence[PairedRuns], base: str, arm: str) -> altair.TopLevelMixin:
    """A panel for each quantity, a line of each for every pair, rejected attempts with the reason."""
    import altair as alt

    panels = [_panel(pairs, quantity, base, arm, first=i == 0) for i, quantity in enumerate(measured(pairs))]
    return alt.hconcat(*panels, spacing=14)


def _panel(
    pairs: Sequence[PairedRuns], quantity: str, base: str, arm: str, *, first: bool
) -> altair.LayerChart | altair.FacetChart:
    import altair as alt

    places = [pair.label for pair in pairs]
    arms = [base, arm]
    axis = alt.Axis(labelLimit=LABEL) if first else None
    y = alt.Y("pair:N", sort=None, title=None, axis=axis, scale=alt.Scale(domain=places))
    x_axis = alt.Axis(title=f"{QUANTITIES[quantity]}, ms", tickCount=4)
    x = alt.X("value:Q", axis=x_axis, scale=alt.Scale(zero=False, padding=12))
    legend = alt.Legend(title=None, orient="top")
    colour = alt.Color("arm:N", scale=alt.Scale(domain=arms, range=[BEFORE, AFTER]), legend=legend)
    shape = alt.Shape("arm:N", scale=alt.Scale(domain=arms, range=["circle", "diamond"]), legend=legend)
    tooltip = [
        alt.Tooltip("pair:N"),
        alt.Tooltip("arm:N"),
        alt.Tooltip("value:Q", title=f"{QUANTITIES[quantity]}, ms", format=".4f"),
        alt.Tooltip("change:N", title="change in the pair, ms"),
        alt.Tooltip("reason:N", title="counts"),
    ]
    base_chart = alt.Chart(records(list(run_marks(pairs, quantity, base, arm)))).encode(y=y)
    connected = base_chart.transform_filter(alt.FieldEqualPredicate(field="connected", equal=True))
    layers: list[Any] = []
    kinds = {not pair.reason for pair in pairs}
    for counts, dash in ((kind, [1, 0] if kind else [3, 3]) for kind in sorted(kinds, reverse=True)):
        of_kind = connected.transform_filter(alt.FieldEqualPredicate(field="counts", equal=counts))
        layers.append(
            of_kind.mark_rule(color="#888888", strokeDash=dash).encode(
                x=alt.X("before:Q", axis=x_axis), x2="after:Q"
            )
        )
        points = base_chart.transform_filter(alt.FieldEqualPredicate(field="counts", equal=counts))
        layers.append(
            points.mark_point(filled=counts, size=60, opacity=1).encode(
                x=x, color=colour, shape=shape, tooltip=tooltip, description=alt.Description("aria:N")
            )
        )
    lost = [{"pair": p.label, "reason": f"rejected: {p.reason}"} for p in pairs if p.reason]
    if first and lost:
        layers.append(
            alt.Chart(records(lost))
            .mark_text(align="left", color=REJECTED, dy=-9, fontSize=10)
            .encode(y=y, x=alt.value(2), text="reason:N")
        )
    return alt.layer(*layers).properties(width=PANEL, height=alt.Step(26))
