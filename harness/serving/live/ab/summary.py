"""A journal as plain values, and as the tables that a person reads."""

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
            name: {quantity: one.facts() for quantity, one in effects(lines, names[0], name).items()}
            for name in names[1:]
        },
        "agreement": {
            name: found.facts()
            for name in names[1:]
            if (
                found := agreement(
                    [(folder / a, folder / b) for a, b in pairs_of(lines, "result", names[0], name)]
                )
            )
        },
    }


def table(summary: Mapping[str, Any]) -> str:
    """Arms, then what each changes."""
    arms = [
        [name, one["runs"], _ms(one.get("steady_itl_ms")), _percent(one["spread"]),
         _ms(one.get("mean_ttft_ms")), _ms(one.get("mean_tpot_ms")),
         f"{one['decoding_batch']:.2f}" if one["decoding_batch"] else "",
         ", ".join(map(pattern_text, one["prefill_patterns"]))]
        for name, one in summary["arms"].items()
    ]  # fmt: skip
    headers = ["arm", "runs", "decode step", "between runs", "TTFT", "TPOT", "decoding", "prefilled together"]
    parts = [tabulate(arms, headers, disable_numparse=True)]
    changed = [
        [name, QUANTITIES[quantity], f"{one['change']:+.2f} ms", f"{one['low']:+.2f} to {one['high']:+.2f}",
         f"{one['share']:+.1%}", one["pairs"], "" if one["resolved"] else "not resolved"]
        for name, effects_of in summary["effects"].items()
        for quantity, one in effects_of.items()
    ]  # fmt: skip
    if changed:
        columns = ["arm", "against the first", "change", "95 %", "share", "pairs", ""]
        parts.append(tabulate(changed, columns, disable_numparse=True))
    closing = [f"{summary['pairs']} of {summary['asked']} pairs, {summary['runs']} runs"]
    closing += [f"  {count} not counted: {reason}" for reason, count in summary["rejected"].items()]
    closing += [
        f"warning: {name} answers unlike {next(iter(summary['arms']))}: {one['second']:.0%} of its requests "
        "agree in their first two words; does it compute the same?"
        for name, one in summary["agreement"].items()
        if one["suspect"]
    ]
    return "\n\n".join([*parts, "\n".join(closing)])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ms(value: float | None) -> str:
    return f"{value:.2f} ms" if value else ""


def _percent(value: float | None) -> str:
    return f"±{value:.1%}" if value is not None else ""
