"""The doctor's facts as text: machine, libraries, ceilings, noise, what would improve them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from harness.report.terminal import WIDTH
from harness.report.text import duration, three_digits

if TYPE_CHECKING:
    from harness.files import JsonObject
    from harness.results.facts import Facts

LABEL = 20  # at least

Lines = list[tuple[str, str]]


def doctor_text(facts: Facts) -> str:
    """The facts of `doctor.examine`; what there is nothing to say about is left out."""
    groups = (
        ("machine", _machine(facts["machine"], facts["devices"], facts["ceilings"].get("reach", 0))),
        ("libraries", _libraries(facts["libraries"])),
        ("best measured here", _ceilings(facts["ceilings"])),
        ("datasheet", _datasheet(facts["datasheet"])),
        ("instruments", _noise(facts["instruments"])),
        ("conditions", list(facts["conditions"].items())),
        ("runs here", _runs(facts["runs here"])),
        ("what would improve it", [("", line) for line in facts["what would improve it"]]),
    )
    return "\n\n".join(f"{title}\n{_aligned(lines)}" for title, lines in groups if lines)


def _aligned(lines: Lines) -> str:
    """Labels in one column, their texts in the next, broken into lines there."""
    parts = []
    width = max(LABEL, *(len(label) + 2 for label, _ in lines))
    for label, text in lines:
        start = f"  {label:<{width}}" if label else "  - "
        parts.append(
            textwrap.fill(
                text,
                WIDTH,
                initial_indent=start,
                subsequent_indent=" " * len(start),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(parts)


def _reach(claimed: int, reach: int) -> str:
    return (
        f"; reading from {reach / (1 << 20):.0f} MiB is no faster than memory" if 0 < reach < claimed else ""
    )


def _machine(machine: JsonObject, devices: Mapping[str, str], reach: int) -> Lines:
    lines = [("device", f"{machine['device']} ({machine['platform']}, {machine['arch']})")]
    if len(devices) > 1:
        lines.append(("all devices", _alike(devices)))
    if "device_memory" in machine:
        lines.append(("memory", f"{machine['device_memory'] / (1 << 30):.1f} GiB"))
    cache = machine.get("last_level_cache")
    known = f"{cache / (1 << 20):.0f} MiB{_reach(cache, reach)}" if cache else "unknown"
    lines.append(("last-level cache", known))
    lines.append(("threads", f"{machine['threads']} on {machine['cpus']} CPUs"))
    if "driver" in machine:
        lines.append(("driver", machine["driver"]))
    return [*lines, ("system", machine["os"])]


def _alike(devices: Mapping[str, str]) -> str:
    """`cuda:0 to cuda:7: cuda sm_90 NVIDIA H200; cpu: ...`"""
    said = []
    for what, group in groupby(devices, devices.__getitem__):
        first, *others = group
        said.append(f"{first}{f' to {others[-1]}' if others else ''}: {what}")
    return "; ".join(said)


def _libraries(libraries: Mapping[str, str]) -> Lines:
    missing = [name for name, version in libraries.items() if version == "not installed"]
    others = {name: package for name, package in libraries.items() if package.startswith("PyPI's ")}
    known = libraries.keys() - {*missing, *others}
    installed = [f"{name} {version}" for name, version in libraries.items() if name in known]
    groups = [("installed", installed), ("missing", missing)]
    return [
        *((label, ", ".join(names)) for label, names in groups if names),
        *((f"not {name}", package) for name, package in others.items()),
    ]


def _ceilings(ceilings: JsonObject) -> Lines:
    if "problem" in ceilings:
        return [("not measured", ceilings["problem"])]
    if not ceilings:
        return [("nothing yet", "doctor without --quick measures it, as the first run does")]
    return [
        ("read", _bandwidth(ceilings["read"])),
        ("copy", f"{_bandwidth(ceilings['copy'])}, read plus written"),
        *(
            (f"{dtype} product", f"{three_digits(rate / 1e12)} TFLOPS")
            for dtype, rate in ceilings["rates"].items()
        ),
        ("measured last", ceilings["measured"]),
    ]


def _bandwidth(rate: float) -> str:
    return f"{three_digits(rate / 1e12)} TB/s" if rate >= 1e12 else f"{three_digits(rate / 1e9)} GB/s"


def _datasheet(entries: list[JsonObject]) -> Lines:
    if not entries:
        return [("none for this", "no row can be called impossible")]
    return [
        (
            entry["name"],
            ", ".join(f"{dtype} {rate:g} TFLOPS" for dtype, rate in entry["tflops"].items())
            + f", {entry['tbps']:g} TB/s ({entry['source']})",
        )
        for entry in entries
    ]


def _noise(noise: JsonObject) -> Lines:
    if "problem" in noise:
        return [("not measured", noise["problem"])]
    lines = []
    for name, measured in noise.items():
        if name == "clock":
            steps, reading = duration(measured["step_s"]), duration(measured["reading_s"])
            lines.append((name, f"steps of {steps}; {reading} a reading"))
        else:
            lines.append((f"noise of a {name}", _difference(name, measured)))
    return lines


def _difference(workload: str, pair: Mapping[str, float | None]) -> str:
    ratio, low, high = (pair[name] for name in ("ratio", "low", "high"))
    if ratio is None or low is None or high is None:
        return f"too few rounds of the {workload} to tell"
    text = (
        f"two preparations of the same {workload} differ by {abs(ratio - 1):.1%} "
        f"({low - 1:+.1%} .. {high - 1:+.1%})"
    )
    return text if pair["floor"] is not None else f"{text}: disturbed, nothing can be told apart"


def _runs(runs: Mapping[str, str]) -> Lines:
    """Per op, timed ones first."""
    by_op: dict[str, dict[str, list[str]]] = {}
    for name, how in runs.items():
        op, implementation = name.split(" ", 1)
        by_op.setdefault(op, {}).setdefault(how, []).append(implementation)
    return [
        (op, "; ".join(f"{how}: {', '.join(ways[how])}" for how in sorted(ways, reverse=True)))
        for op, ways in by_op.items()
    ]
