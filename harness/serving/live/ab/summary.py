"""Summary of a journal: as plain values, and as the tables that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.serving.live.ab.agreement import agreement
from harness.serving.live.ab.pairs import QUANTITIES, counted, effects, pairs_of, spread
from harness.serving.live.ab.rejection import pattern_text


def summarise(lines: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """As plain values: each arm against the first, with the runs that did not count and why. `folder` holds
    the results that the lines name."""
    plan = lines[0]
    asked = [line["pairs"] for line in lines if line["kind"] in ("plan", "resumed")][-1]
    names = [arm["name"] for arm in plan["arms"]]
    runs = [line for line in lines if line["kind"] == "run"]
    lost: dict[str, int] = {}
    for run in runs:
        for reason in run["reasons"][:1]:
            lost[reason] = lost.get(reason, 0) + 1
    kept = {line["pair"] for line in lines if line["kind"] == "pair"}
    good = counted(lines)
    return {
        "model": plan["model"],
        "engine": plan["engine"],
        "load": plan["load"],
        "asked": asked,
        "pairs": len(kept),
        "given_up": [line for line in lines if line["kind"] == "given_up" and line["pair"] not in kept],
        "runs": len(runs),
        "rejected": lost,
        "arms": {
            name: {
                "runs": sum(r["arm"] == name for r in good),
                "spread": spread(lines, name),
                **{quantity: effect.base for quantity, effect in effects(lines, name, name).items()},
                "decoding_batch": _mean([r["decoding_batch"] for r in good if r["arm"] == name]),
                "prefill_patterns": sorted({tuple(r["prefill_pattern"]) for r in good if r["arm"] == name}),
            }
            for name in names
        },
        "effects": {
            name: {quantity: change.facts() for quantity, change in effects(lines, names[0], name).items()}
            for name in names[1:]
        },
        "agreement": {
            name: answers.facts()
            for name in names[1:]
            if (
                answers := agreement(
                    [(folder / a, folder / b) for a, b in pairs_of(lines, "result", names[0], name)]
                )
            )
        },
    }


def table(summary: Mapping[str, Any]) -> str:
    """Arms, then what each changes."""
    arms = [
        [name, facts["runs"], _ms(facts.get("steady_itl_ms")), _percent(facts["spread"]),
         _ms(facts.get("mean_ttft_ms")), _ms(facts.get("mean_tpot_ms")),
         f"{facts['decoding_batch']:.2f}" if facts["decoding_batch"] else "",
         ", ".join(map(pattern_text, facts["prefill_patterns"]))]
        for name, facts in summary["arms"].items()
    ]  # fmt: skip
    headers = ["arm", "runs", "decode step", "between runs", "TTFT", "TPOT", "decoding", "prefilled together"]
    parts = [tabulate(arms, headers, disable_numparse=True)]
    changed = [
        [name, QUANTITIES[quantity], f"{change['change']:+.2f} ms",
         f"{change['low']:+.2f} to {change['high']:+.2f}", f"{change['share']:+.1%}", change["pairs"],
         "" if change["resolved"] else "not resolved"]
        for name, effects_of in summary["effects"].items()
        for quantity, change in effects_of.items()
    ]  # fmt: skip
    if changed:
        columns = ["arm", "against the first", "change", "95 %", "share", "pairs", ""]
        parts.append(tabulate(changed, columns, disable_numparse=True))
    closing = [f"{summary['pairs']} of {summary['asked']} pairs, {summary['runs']} runs"]
    closing += [f"  {count} not counted: {reason}" for reason, count in summary["rejected"].items()]
    closing += [
        f"warning: {name} answers unlike {next(iter(summary['arms']))}: {answers['second']:.0%} of its "
        "requests agree in their first two words; does it compute the same?"
        for name, answers in summary["agreement"].items()
        if answers["suspect"]
    ]
    return "\n\n".join([*parts, "\n".join(closing)])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ms(value: float | None) -> str:
    return f"{value:.2f} ms" if value else ""


def _percent(value: float | None) -> str:
    return f"±{value:.1%}" if value is not None else ""
