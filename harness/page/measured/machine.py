"""Machine: on what a run was measured, with which versions and flags, what disturbed it, and the command that
makes it again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from harness.page.document import Chart, PageSection, Table, TableRow, TableValue, anchor
from harness.page.measured.case import MeasuredCase, short_keys
from harness.report.disturbance import disturbance
from harness.report.text import significant
from harness.results.schema import Run

ENDS = ("min", "median", "max")
STATES = {"counted": "#D55E00", "left out": "#56B4E9", "quiet": "#bbbbbb"}


def machine_section(run: Run, cases: Sequence[MeasuredCase], label: str) -> PageSection:
    return PageSection(
        anchor("machine", run.id),
        f"Machine and origin{f': {label}' if label else ''}",
        str(run.provenance.get("machine", {}).get("device", "an unknown device")),
        [*_disturbed(cases, run), *_conditions(cases, run), _facts(run)],
        [
            ("again", "python -m harness " + shlex.join(run.command)),
            *([("not quiet", text)] if (text := disturbance(case.done for case in cases)) else []),
            *(("busy at the start", text) for text in run.busy),
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
        *(("arm", name, _settings(variables)) for name, variables in run.arms.items()),
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
    rows = [
        TableRow(
            [
                case.planned.key,
                name,
                *(TableValue(significant(reading[end], 4), reading[end]) for end in ENDS),
            ]
        )
        for case in cases
        for conditions in case.done.conditions
        for name, reading in conditions.items()
        if isinstance(reading, dict) and reading.keys() == set(ENDS)
    ]
    return [
        Chart(
            anchor("conditions", run.id),
            "Clocks, heat, load",
            "What the monitors read in each case's rounds; what they could not is not here.",
            None,
            Table(("case", "what", *ENDS), rows, frozenset(ENDS)),
        )
    ] * bool(rows)


def _disturbed(cases: Sequence[MeasuredCase], run: Run) -> list[Chart]:
    """Rounds of each case by what became of them, where any was disturbed."""
    import altair as alt

    if not any(case.done.disturbed for case in cases):
        return []
    keys = short_keys(cases)
    values: list[dict[str, Any]] = []
    for place, case in enumerate(cases):
        left_out = sum(not r.counted for r in case.done.disturbed)
        counted = len(case.done.disturbed) - left_out
        quiet = case.done.rounds + case.done.heats - counted
        reason = case.done.disturbed[0].reason if case.done.disturbed else ""
        for state, rounds in (("quiet", quiet), ("counted", counted), ("left out", left_out)):
            if rounds:
                values.append(
                    {
                        "case": keys[case.planned.key],
                        "place": place,
                        "state": state,
                        "rounds": rounds,
                        "reason": reason * (state != "quiet"),
                    }
                )
    picture = (
        alt.Chart({"values": values})
        .mark_bar()
        .encode(
            y=alt.Y("case:N", sort=alt.EncodingSortField("place", op="min"), title=None),
            x=alt.X("rounds:Q", title="rounds", scale=alt.Scale(zero=True)),
            color=alt.Color(
                "state:N", scale=alt.Scale(domain=list(STATES), range=list(STATES.values())), title=None
            ),
            tooltip=["case:N", "state:N", "rounds:Q", "reason:N"],
        )
        .properties(width=480, height=alt.Step(20))
    )
    rows = [
        TableRow([v["case"], v["state"], TableValue(str(v["rounds"]), v["rounds"]), v["reason"]])
        for v in values
    ]
    return [
        Chart(
            anchor("disturbed", run.id),
            "Disturbed rounds, in the order of measuring",
            "Rounds in which something else used the machine, or slowed it: counted where none was quiet, "
            "else left out and made again.",
            picture,
            Table(("case", "state", "rounds", "e.g."), rows, frozenset({"rounds"})),
            len(values),
        )
    ]
