"""What the doctor found, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

WIDTH = 110
LABEL = 20

Lines = list[tuple[str, str]]


def text(facts: Mapping[str, Any]) -> str:
    """The facts of `doctor.examine`; what there is nothing to say about is left out."""
    groups = (
        ("machine", _machine(facts["machine"], facts["devices"])),
        ("libraries", _libraries(facts["libraries"])),
        ("best measured here", _ceilings(facts["ceilings"])),
        ("datasheet", _datasheet(facts["datasheet"])),
        ("instruments", _instruments(facts["instruments"])),
        ("conditions", list(facts["conditions"].items())),
        ("runs here", _runs(facts["runs here"])),
        ("what would improve it", [("", line) for line in facts["what would improve it"]]),
    )
    return "\n\n".join(f"{title}\n{_aligned(lines)}" for title, lines in groups if lines)


def _aligned(lines: Lines) -> str:
    """Labels in one column, what they say in the next, broken into lines there."""
    parts = []
    for label, said in lines:
        start = f"  {label:<{LABEL}}" if label else "  - "
        parts.append(
            textwrap.fill(
                said,
                WIDTH,
                initial_indent=start,
                subsequent_indent=" " * len(start),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(parts)


def _machine(machine: Mapping[str, Any], devices: Mapping[str, str]) -> Lines:
    lines = [("device", f"{machine['device']} ({machine['platform']}, {machine['arch']})")]
    if len(devices) > 1:
        lines.append(("all devices", "; ".join(f"{name}: {what}" for name, what in devices.items())))
    if "device_memory" in machine:
        lines.append(("memory", f"{machine['device_memory'] / (1 << 30):.1f} GiB"))
    cache = machine.get("last_level_cache")
    lines.append(("last-level cache", f"{cache / (1 << 20):.0f} MiB" if cache else "unknown"))
    lines.append(("threads", f"{machine['threads']} on {machine['cpus']} CPUs"))
    if "driver" in machine:
        lines.append(("driver", machine["driver"]))
    return [*lines, ("system", machine["os"])]


def _libraries(libraries: Mapping[str, str]) -> Lines:
    missing = [name for name, found in libraries.items() if found == "not installed"]
    others = {name: found for name, found in libraries.items() if found.startswith("PyPI's ")}
    known = libraries.keys() - {*missing, *others}
    installed = [f"{name} {found}" for name, found in libraries.items() if name in known]
    groups = [(label, ", ".join(names)) for label, names in _told(installed=installed, missing=missing)]
    return [*groups, *((f"not {name}", found) for name, found in others.items())]


def _told(**groups: list[str]) -> Iterable[tuple[str, list[str]]]:
    return ((label, names) for label, names in groups.items() if names)


def _ceilings(ceilings: Mapping[str, Any]) -> Lines:
    if "problem" in ceilings:
        return [("not measured", ceilings["problem"])]
    if not ceilings:
        return [("nothing yet", "doctor without --quick measures it, as the first run does")]
    return [
        ("read", _bandwidth(ceilings["read"])),
        ("copy", f"{_bandwidth(ceilings['copy'])}, read plus written"),
        *((f"{dtype} product", f"{_short(rate / 1e12)} TFLOPS") for dtype, rate in ceilings["rates"].items()),
        ("measured last", ceilings["measured"]),
    ]


def _bandwidth(rate: float) -> str:
    return f"{_short(rate / 1e12)} TB/s" if rate >= 1e12 else f"{_short(rate / 1e9)} GB/s"


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _datasheet(entries: list[dict[str, Any]]) -> Lines:
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


def _instruments(found: Mapping[str, Any]) -> Lines:
    if "problem" in found:
        return [("not measured", found["problem"])]
    lines = []
    for name, seen in found.items():
        if name == "clock":
            said = f"steps of {_duration(seen['step_s'])}; {_duration(seen['reading_s'])} a reading"
        else:
            said = _difference(name, seen)
        lines.append((f"noise of a {name}" if name != "clock" else name, said))
    return lines


def _difference(workload: str, seen: Mapping[str, float | None]) -> str:
    ratio, low, high = (seen[name] for name in ("ratio", "low", "high"))
    if ratio is None or low is None or high is None:
        return f"too few rounds of the {workload} to tell"
    said = (
        f"two preparations of the same {workload} differ by {abs(ratio - 1):.1%} "
        f"({low - 1:+.1%} .. {high - 1:+.1%})"
    )
    return said if seen["floor"] is not None else f"{said}: disturbed, nothing can be told apart"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds >= 1e-6 else f"{seconds * 1e9:.3g} ns"


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
