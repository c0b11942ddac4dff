"""The text of `doctor`, and the table of `doctor --bind`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from harness.report.terminal import line_width, wrapped
from harness.report.text import duration, grouped, significant

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from harness.files import JsonObject

MIN_LABEL_WIDTH = 20  # characters of the column of labels
STATUS_STYLES = {"breaks": "bold red", "too old": "dim", "not told": "yellow"}  # of RowBinding.status

Lines = list[tuple[str, str]]  # label and text of each line; a text with an empty label is an item of a list


def doctor_text(facts: JsonObject) -> str:
    """The facts of `harness.doctor.examine` as text, in titled groups of lines; empty groups are left out."""
    groups = (
        ("machine", _machine(facts["machine"], facts["devices"], facts["ceilings"].get("reach", 0))),
        ("libraries", _libraries(facts["libraries"])),
        ("best measured here", _ceilings(facts["ceilings"])),
        ("datasheet", _datasheet(facts["datasheet"])),
        ("instruments", _instruments(facts["instruments"])),
        ("conditions", [_condition(name, value) for name, value in facts["conditions"].items()]),
        ("runs here", _runs(facts["runs here"])),
        ("what would improve it", [("", line) for line in facts["what would improve it"]]),
    )
    return "\n\n".join(f"{title}\n{_aligned(lines)}" for title, lines in groups if lines)


def _aligned(lines: Lines) -> str:
    """Labels in one column and their texts, broken into lines, in the next."""
    paragraphs = []
    width = max(MIN_LABEL_WIDTH, *(len(label) + 2 for label, _ in lines))
    for label, text in lines:
        start = f"  {label:<{width}}" if label else "  - "
        paragraphs.append(wrapped(text, start, " " * len(start), line_width()))
    return "\n".join(paragraphs)


UNITS = {"mhz": "MHz", "percent": "%", "c": "°C", "w": "W"}  # the end of a condition's name -> its unit


def _condition(name: str, value: str) -> tuple[str, str]:
    """`steal_percent`, `0` -> `steal`, `0 %`; a value that is no number gets no unit."""
    label, _, unit = name.rpartition("_")
    if unit not in UNITS:
        return name.replace("_", " "), value
    label = label.replace("_", " ").replace("others", "other processes")
    return label, f"{value} {UNITS[unit]}" if value[:1].isdigit() else value


def _machine(machine: JsonObject, devices: Mapping[str, str], reach_bytes: int) -> Lines:
    """devices: descriptions by name; reach_bytes: `reach` of catalogue.devices.Ceilings, 0 if not known"""
    lines = [("device", f"{machine['device']} ({machine['platform']}, {machine['arch']})")]
    if len(devices) > 1:  # `cuda:0 to cuda:7: cuda sm_90 NVIDIA H200; cpu: ...`
        ranges = []
        for description, names in groupby(devices, lambda name: devices[name]):
            first, *others = names
            name_range = f"{first} to {others[-1]}" if others else first
            ranges.append(f"{name_range}: {description}")
        lines.append(("all devices", "; ".join(ranges)))
    if "device_memory" in machine:
        lines.append(("memory", f"{machine['device_memory'] / (1 << 30):.1f} GiB"))
    cache_bytes = machine.get("last_level_cache") or 0
    cache_text = f"{cache_bytes / (1 << 20):.0f} MiB" if cache_bytes else "unknown"
    if 0 < reach_bytes < cache_bytes:
        cache_text += f"; reading from {reach_bytes / (1 << 20):.0f} MiB is no faster than memory"
    lines.append(("last-level cache", cache_text))
    lines.append(("threads", f"{machine['threads']} on {machine['cpus']} CPUs"))
    if "driver" in machine:
        lines.append(("driver", machine["driver"]))
    return [*lines, ("system", machine["os"])]


def _libraries(libraries: Mapping[str, str]) -> Lines:
    """libraries: name -> version, `not installed`, or what another package of this name is (`PyPI's ...`)"""
    missing = [name for name, version in libraries.items() if version == "not installed"]
    namesakes = {name: version for name, version in libraries.items() if version.startswith("PyPI's ")}
    installed = [f"{name} {v}" for name, v in libraries.items() if name not in (*missing, *namesakes)]
    lines = [("installed", ", ".join(installed)), ("missing", ", ".join(missing))]
    lines = [(label, names) for label, names in lines if names]
    return lines + [(f"not {name}", what_it_is) for name, what_it_is in namesakes.items()]


def _ceilings(ceilings: JsonObject) -> Lines:
    if "problem" in ceilings:
        return [("not measured", ceilings["problem"])]
    if not ceilings:
        return [("nothing yet", "doctor without --quick measures it, as the first run does")]
    rates = ceilings["rates"].items()
    lines = [("read", _bandwidth(ceilings["read"])),
             ("copy", f"{_bandwidth(ceilings['copy'])}, read plus written")]  # fmt: skip
    lines += [(f"{dtype} product", f"{significant(rate / 1e12)} TFLOPS") for dtype, rate in rates]
    return [*lines, ("measured last", ceilings["measured"])]


def _bandwidth(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e12:
        return f"{significant(bytes_per_s / 1e12)} TB/s"
    return f"{significant(bytes_per_s / 1e9)} GB/s"


def _datasheet(entries: list[JsonObject]) -> Lines:
    if not entries:  # a time is impossible if it is better than the peaks of the data sheet
        return [("none for this", "no row can be called impossible")]
    lines = []
    for entry in entries:
        rates = ", ".join(f"{dtype} {rate:g} TFLOPS" for dtype, rate in entry["tflops"].items())
        lines.append((entry["name"], f"{rates}, {entry['tbps']:g} TB/s ({entry['source']})"))
    return lines


def _instruments(instruments: JsonObject) -> Lines:
    """The steps of the clock, and the noise of each workload that was prepared twice."""
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
    """What the A/A pair of a workload shows. `floor`, the noise, is None if it was too disturbed to tell."""
    ratio, low, high = pair["ratio"], pair["low"], pair["high"]
    if ratio is None or low is None or high is None:
        return f"too few rounds of the {workload} to tell"
    interval = f"({low - 1:+.1%} .. {high - 1:+.1%})"
    disturbed = "" if pair["floor"] is not None else ": disturbed, no difference can be seen"
    return f"two preparations of the same {workload} differ by {abs(ratio - 1):.1%} {interval}{disturbed}"


def _runs(runs: Mapping[str, str]) -> Lines:
    """A line for each op. runs: `OP IMPLEMENTATION` -> `timed` or `checked only`"""
    lines = []
    for op, names in grouped(runs, lambda name: name.partition(" ")[0]).items():
        groups = []
        for how in ("timed", "checked only"):
            implementations = [name.removeprefix(f"{op} ") for name in names if runs[name] == how]
            if implementations:
                groups.append(f"{how}: {', '.join(implementations)}")
        lines.append((op, "; ".join(groups)))
    return lines


def binding_table(rows: Sequence[Mapping[str, str]]) -> Group:
    """Which rows can call releases of their libraries: a line for each row that breaks, then for each release
    a table of the other rows. Each row has the fields of `harness.doctor.bindings.RowBinding`."""
    from rich.console import Group
    from rich.text import Text

    from harness.report.fitting_table import Column, FittingTable

    parts: list[RenderableType] = []
    for row in rows:
        if row["status"] == "breaks":
            name = f"{row['library']} {row['version']}: {row['op']} {row['implementation']} "
            text = Text(name, no_wrap=True, overflow="ignore")
            text.append("breaks", STATUS_STYLES["breaks"])
            parts.append(text.append(f": {row['reason']}"))
    for (library, version), of_release in grouped(rows, lambda row: (row["library"], row["version"])).items():
        counts = Counter(row["status"] for row in of_release)
        summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        last_read = of_release[0]["last_read"]
        newer = f"; newer than {last_read}, the last that was read" if last_read else ""
        if parts:
            parts.append("")
        parts.append(Text(f"{library} {version}: {summary}{newer}", "bold"))
        unbroken = [row for row in of_release if row["status"] != "breaks"]
        if unbroken:
            columns = (Column("op"), Column("implementation"), Column("calls"), Column("reason", wraps=True),
                       Column("without", wraps=True, spare=1))  # fmt: skip
            cells = [
                (row["op"], row["implementation"], Text(row["status"], STATUS_STYLES.get(row["status"], "")),
                 row["reason"], row["without"])
                for row in unbroken
            ]  # fmt: skip
            parts.append(FittingTable(columns, cells))
    return Group(*parts)
