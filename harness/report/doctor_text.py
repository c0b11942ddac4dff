"""What `doctor` and `doctor --bind` print."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from harness.report.terminal import line_width
from harness.report.text import duration, significant

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from harness.files import JsonObject

LABEL = 20  # the least width of the column of labels
STYLES = {"breaks": "bold red", "too old": "dim", "not told": "yellow"}

Lines = list[tuple[str, str]]  # (label, text) of each line; an empty label makes an item of a list


def doctor_text(facts: JsonObject) -> str:
    """The facts of `harness.doctor.examine` as text. Empty parts are left out."""
    groups = (
        ("machine", _machine(facts["machine"], facts["devices"], facts["ceilings"].get("reach", 0))),
        ("libraries", _libraries(facts["libraries"])),
        ("best measured here", _ceilings(facts["ceilings"])),
        ("datasheet", _datasheet(facts["datasheet"])),
        ("instruments", _noise(facts["instruments"])),
        ("conditions", [_condition(name, text) for name, text in facts["conditions"].items()]),
        ("runs here", _runs(facts["runs here"])),
        ("what would improve it", [("", line) for line in facts["what would improve it"]]),
    )
    return "\n\n".join(f"{title}\n{_aligned(lines)}" for title, lines in groups if lines)


def _aligned(lines: Lines) -> str:
    """Labels in one column and their texts, broken into lines, in the next."""
    parts = []
    width = max(LABEL, *(len(label) + 2 for label, _ in lines))
    for label, text in lines:
        start = f"  {label:<{width}}" if label else "  - "
        wrapper = textwrap.TextWrapper(line_width(), start, " " * len(start))
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        parts.append(wrapper.fill(text))
    return "\n".join(parts)


UNITS = {"mhz": "MHz", "percent": "%", "c": "°C", "w": "W"}


def _condition(name: str, text: str) -> tuple[str, str]:
    """`steal_percent`, `0` -> `steal`, `0 %`; a text that is no number has no unit."""
    words, _, unit = name.rpartition("_")
    if unit not in UNITS:
        return name.replace("_", " "), text
    words = words.replace("_", " ").replace("others", "other processes")
    return words, f"{text} {UNITS[unit]}" if text[:1].isdigit() else text


def _machine(machine: JsonObject, devices: Mapping[str, str], reach: int) -> Lines:
    lines = [("device", f"{machine['device']} ({machine['platform']}, {machine['arch']})")]
    if len(devices) > 1:  # `cuda:0 to cuda:7: cuda sm_90 NVIDIA H200; cpu: ...`
        said = []
        for what, group in groupby(devices, devices.__getitem__):
            first, *others = group
            said.append(f"{first}{f' to {others[-1]}' if others else ''}: {what}")
        lines.append(("all devices", "; ".join(said)))
    if "device_memory" in machine:
        lines.append(("memory", f"{machine['device_memory'] / (1 << 30):.1f} GiB"))
    cache, known = machine.get("last_level_cache"), "unknown"
    if cache:
        known = f"{cache / (1 << 20):.0f} MiB"
        if 0 < reach < cache:
            known += f"; reading from {reach / (1 << 20):.0f} MiB is no faster than memory"
    lines.append(("last-level cache", known))
    lines.append(("threads", f"{machine['threads']} on {machine['cpus']} CPUs"))
    if "driver" in machine:
        lines.append(("driver", machine["driver"]))
    return [*lines, ("system", machine["os"])]


def _libraries(libraries: Mapping[str, str]) -> Lines:
    installed, missing, others = [], [], []
    for name, version in libraries.items():
        if version == "not installed":
            missing.append(name)
        elif version.startswith("PyPI's "):  # another package of the same name
            others.append((f"not {name}", version))
        else:
            installed.append(f"{name} {version}")
    groups = [("installed", installed), ("missing", missing)]
    return [*((label, ", ".join(names)) for label, names in groups if names), *others]


def _ceilings(ceilings: JsonObject) -> Lines:
    if "problem" in ceilings:
        return [("not measured", ceilings["problem"])]
    if not ceilings:
        return [("nothing yet", "doctor without --quick measures it, as the first run does")]
    rates = ceilings["rates"].items()
    return [
        ("read", _bandwidth(ceilings["read"])),
        ("copy", f"{_bandwidth(ceilings['copy'])}, read plus written"),
        *((f"{dtype} product", f"{significant(rate / 1e12)} TFLOPS") for dtype, rate in rates),
        ("measured last", ceilings["measured"]),
    ]


def _bandwidth(rate: float) -> str:
    return f"{significant(rate / 1e12)} TB/s" if rate >= 1e12 else f"{significant(rate / 1e9)} GB/s"


def _datasheet(entries: list[JsonObject]) -> Lines:
    if not entries:
        return [("none for this", "no row can be called impossible")]
    lines = []
    for entry in entries:
        rates = ", ".join(f"{dtype} {rate:g} TFLOPS" for dtype, rate in entry["tflops"].items())
        lines.append((entry["name"], f"{rates}, {entry['tbps']:g} TB/s ({entry['source']})"))
    return lines


def _noise(instruments: JsonObject) -> Lines:
    if "problem" in instruments:
        return [("not measured", instruments["problem"])]
    lines = []
    for name, measured in instruments.items():
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
    interval = f"({low - 1:+.1%} .. {high - 1:+.1%})"
    text = f"two preparations of the same {workload} differ by {abs(ratio - 1):.1%} {interval}"
    return text if pair["floor"] is not None else f"{text}: disturbed, no difference can be seen"


def _runs(runs: Mapping[str, str]) -> Lines:
    """A line for each op; implementations that are timed come first."""
    by_op: dict[str, dict[str, list[str]]] = {}
    for name, how in runs.items():
        op, implementation = name.split(" ", 1)
        by_op.setdefault(op, {}).setdefault(how, []).append(implementation)
    return [
        (op, "; ".join(f"{how}: {', '.join(ways[how])}" for how in sorted(ways, reverse=True)))
        for op, ways in by_op.items()
    ]


def binding_table(rows: Sequence[Mapping[str, str]]) -> Group:
    """Which rows bind: a line for each that breaks, then a table for each release.

    rows: the fields of `harness.doctor.bindings.RowBinding`
    """
    from rich.console import Group
    from rich.text import Text

    from harness.report.fitting_table import Column, Columns, as_table
    from harness.report.text import grouped

    parts: list[RenderableType] = []
    for row in rows:
        if row["status"] == "breaks":
            name = f"{row['library']} {row['version']}: {row['op']} {row['implementation']} "
            text = Text(name, no_wrap=True, overflow="ignore")
            parts.append(text.append("breaks", STYLES["breaks"]).append(f": {row['reason']}"))
    for (library, version), mine in grouped(rows, lambda row: (row["library"], row["version"])).items():
        counts = Counter(row["status"] for row in mine)
        summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        read = mine[0]["last_read"]
        newer = f"; newer than {read}, the last that was read" if read else ""
        if parts:
            parts.append("")
        parts.append(Text(f"{library} {version}: {summary}{newer}", "bold"))
        fit = [row for row in mine if row["status"] != "breaks"]
        if fit:
            columns: Columns = {
                Column("op"): [row["op"] for row in fit],
                Column("implementation"): [row["implementation"] for row in fit],
                Column("calls"): [Text(row["status"], STYLES.get(row["status"], "")) for row in fit],
                Column("reason", wraps=True): [row["reason"] for row in fit],
                Column("without", wraps=True, spare=1): [row["without"] for row in fit],
            }
            parts.append(as_table(columns))
    return Group(*parts)
