"""Machine: on what a run was measured, with which versions and flags, what disturbed it, and the command that
makes it again."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.page.document import Chart, PageSection, Table, TableRow, TableValue, anchor
from harness.page.measured.case import MeasuredCase, short_keys
from harness.page.measured.devices import device_charts
from harness.report.disturbance import disturbance
from harness.report.spread_text import spread_lines
from harness.report.text import significant
from harness.results.schema import Run

if TYPE_CHECKING:
    import altair

ENDS = ("min", "median", "max")
STATES = {"counted": "#D55E00", "left out": "#56B4E9", "quiet": "#8885"}
IN_ORDER = "From left to right is the order of measuring; records have no times of day."
READ = "#0072B2"
WIDTH = 640


def machine_section(run: Run, cases: Sequence[MeasuredCase], label: str) -> PageSection:
    not_quiet = disturbance(case.done for case in cases).removeprefix("not quiet: ")
    return PageSection(
        anchor("machine", run.id),
        f"Machine and origin{f': {label}' if label else ''}",
        str(run.provenance.get("machine", {}).get("device", "an unknown device")),
        [*_disturbed(cases, run), *_conditions(cases, run), *device_charts(cases, run), _facts(run)],
        [
            ("again", "python -m harness " + shlex.join(run.command)),
            *([("not quiet", not_quiet)] if not_quiet else []),
            *(("busy at the start", text) for text in run.busy),
            *(("devices", line) for line in spread_lines(cases[0].spreads if cases else ())),
        ],
    )


def _facts(run: Run) -> Chart:
    known: list[tuple[str, str, Any]] = [
        ("run", "id", run.id),
        ("run", "created", run.created),
        ("run", "suite", run.suite),
        ("run", "cache", run.cache),
        ("run", "confidence", run.confidence),
        ("run", "seed", run.seed),
        *(("setting", name, _settings(variables)) for name, variables in run.settings.items()),
    ]
    for group, values in run.provenance.items():
        known += [(group, name, value) for name, value in values.items()] if isinstance(values, dict) else []
    rates = dict(run.ceilings or {})
    for dtype, rate in dict(rates.pop("rates", {})).items():
        known.append(("ceilings", f"{dtype}, TFLOPS", significant(rate / 1e12)))
    for name in ("read", "copy"):
        if rates.get(name):
            known.append(("ceilings", f"{name}, GB/s", significant(rates[name] / 1e9)))
    return Chart(
        anchor("facts", run.id),
        "What it was measured on",
        "What was asked for, the machine, versions, flags, and the limits that it was measured to reach.",
        None,
        Table(("of", "what", "value"), [TableRow([of, what, str(value)]) for of, what, value in known]),
    )


def _settings(variables: dict[str, str | None]) -> str:
    return (
        " ".join(
            f"{name}={value}" if value is not None else f"{name} not set" for name, value in variables.items()
        )
        or "nothing set"
    )


def _conditions(cases: Sequence[MeasuredCase], run: Run) -> list[Chart]:
    """Clocks, temperature, power, other processes' share: as the rounds of each case saw them."""
    keys = short_keys(cases) if cases else {}
    values = [
        {"case": keys[case.planned.key], "place": place, "what": name, **reading}
        for place, case in enumerate(cases, 1)
        for conditions in case.done.conditions
        for name, reading in conditions.items()
        if isinstance(reading, dict) and reading.keys() == set(ENDS)
    ]
    rows = [
        TableRow([v["case"], v["what"], *(TableValue(significant(v[end], 4), v[end]) for end in ENDS)])
        for v in values
    ]
    return [
        Chart(
            anchor("conditions", run.id),
            "Clocks, heat, load",
            "What the monitors read in each case's rounds: the dot is the median, the bar goes from the "
            f"least to the most. What they could not read is not here. {IN_ORDER} No axis begins at zero.",
            _readings(values),
            Table(("case", "what", *ENDS), rows, frozenset(ENDS)),
            len(values),
        )
    ] * bool(rows)


def _readings(values: Sequence[dict[str, Any]]) -> altair.TopLevelMixin:
    """A plot for each quantity, below each other."""
    import altair as alt

    x = alt.X("place:O", title="case, in the order of measuring", axis=alt.Axis(labelAngle=0))
    base = alt.Chart().encode(x=x)
    return (
        alt.layer(
            base.mark_rule(strokeWidth=6, opacity=0.35, color=READ, aria=False).encode(
                y=alt.Y("min:Q", title=None, scale=alt.Scale(zero=False)), y2="max:Q"
            ),
            base.mark_point(filled=True, size=50, opacity=1, color=READ).encode(
                y="median:Q", tooltip=["what:N", "case:N", *(f"{end}:Q" for end in ENDS)]
            ),
        )
        .properties(width=WIDTH, height=70)
        .facet(
            data={"values": list(values)},
            row=alt.Row("what:N", sort=None, title=None),
            spacing=6,
        )
        .resolve_scale(y="independent")
    )


def _disturbed(cases: Sequence[MeasuredCase], run: Run) -> list[Chart]:
    """Rounds of each block by what became of them, where any was disturbed."""
    import altair as alt

    if not any(case.done.disturbed for case in cases):
        return []
    keys = short_keys(cases)
    values: list[dict[str, Any]] = []
    place = 0
    for case in cases:
        reasons = {r.block: r.reason for r in case.done.disturbed}
        for block, states in _blocks(case).items():
            place += 1
            values += [
                {
                    "place": place,
                    "case": keys[case.planned.key],
                    "block": block,
                    "state": state,
                    "rounds": rounds,
                    "reason": "" if state == "quiet" else reasons[block],
                }
                for state, rounds in states.items()
            ]
    picture = (
        alt.Chart({"values": values})
        .mark_bar()
        .encode(
            x=alt.X(
                "place:O",
                title="blocks, in the order of measuring, case after case",
                scale=alt.Scale(padding=0),
                axis=alt.Axis(labels=False, ticks=False),
            ),
            y=alt.Y(
                "rounds:Q", stack="normalize", title="share of the block's rounds", axis=alt.Axis(format="%")
            ),
            color=alt.Color(
                "state:N", scale=alt.Scale(domain=list(STATES), range=list(STATES.values())), title=None
            ),
            tooltip=["case:N", "block:Q", "state:N", "rounds:Q", "reason:N"],
        )
        .properties(width=alt.Step(max(1, WIDTH // place)), height=140)
    )
    rows = [
        TableRow(
            [
                v["case"],
                TableValue(str(v["block"]), v["block"]),
                v["state"],
                TableValue(str(v["rounds"]), v["rounds"]),
                v["reason"],
            ]
        )
        for v in values
    ]
    return [
        Chart(
            anchor("disturbed", run.id),
            "Disturbed rounds",
            "A bar is a block of rounds, and of it the share in which something else used the machine, or "
            "slowed it: counted where none was quiet, else left out and made again. " + IN_ORDER,
            picture,
            Table(("case", "block", "state", "rounds", "e.g."), rows, frozenset({"block", "rounds"})),
            len(values),
        )
    ]


def _blocks(case: MeasuredCase) -> dict[int, Counter[str]]:
    """Of each block how many of its rounds became what."""
    samples = [samples for cell in case.cells for samples in (cell.samples, cell.eliminations)]
    states = {place: "quiet" for of in samples for place in zip(of.block, of.round, strict=True)}
    states |= {(r.block, r.round): "counted" if r.counted else "left out" for r in case.done.disturbed}
    blocks: dict[int, Counter[str]] = {}
    for (block, _), state in sorted(states.items()):
        blocks.setdefault(block, Counter())[state] += 1
    return blocks
