"""What `doctor` found, as text: machine, libraries, limits, noise, what would improve them; and which rows
bind to which releases of their libraries."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from harness.report.terminal import WIDTH
from harness.report.text import duration, in_digits

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from harness.files import JsonObject
    from harness.report.fitting_table import FittingTable
    from harness.results.schema import Facts

LABEL = 20
"""The least width of the column of labels, in characters."""
STYLES = {"breaks": "bold red", "too old": "dim", "not told": "yellow"}
"""By status of a binding."""

Lines = list[tuple[str, str]]
"""Each a label and a text."""


def doctor_text(facts: Facts) -> str:
    """The facts of `doctor.examine`; a group without a line is left out."""
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
    """Labels in one column, and their texts in the next, broken into lines."""
    parts = []
    width = max(LABEL, *(len(label) + 2 for label, _ in lines))
    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    for label, text in lines:
        wrapper.initial_indent = f"  {label:<{width}}" if label else "  - "
        wrapper.subsequent_indent = " " * len(wrapper.initial_indent)
        parts.append(wrapper.fill(text))
    return "\n".join(parts)


def _machine(machine: JsonObject, devices: Mapping[str, str], reach: int) -> Lines:
    """reach: bytes from which on reading was measured to be no faster than from memory; 0: not measured"""
    lines = [("device", f"{machine['device']} ({machine['platform']}, {machine['arch']})")]
    if len(devices) > 1:
        lines.append(("all devices", _alike(devices)))
    if "device_memory" in machine:
        lines.append(("memory", f"{machine['device_memory'] / (1 << 30):.1f} GiB"))
    cache = machine.get("last_level_cache")
    known = f"{cache / (1 << 20):.0f} MiB" if cache else "unknown"
    if cache and 0 < reach < cache:
        known += f"; reading from {reach / (1 << 20):.0f} MiB is no faster than memory"
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
        names = f"{first} to {others[-1]}" if others else first
        said.append(f"{names}: {what}")
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
            (f"{dtype} product", f"{in_digits(rate / 1e12)} TFLOPS")
            for dtype, rate in ceilings["rates"].items()
        ),
        ("measured last", ceilings["measured"]),
    ]


def _bandwidth(rate: float) -> str:
    return f"{in_digits(rate / 1e12)} TB/s" if rate >= 1e12 else f"{in_digits(rate / 1e9)} GB/s"


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
    """By op; rows that are timed come first."""
    by_op: dict[str, dict[str, list[str]]] = {}
    for name, how in runs.items():
        op, implementation = name.split(" ", 1)
        by_op.setdefault(op, {}).setdefault(how, []).append(implementation)
    return [
        (op, "; ".join(f"{how}: {', '.join(ways[how])}" for how in sorted(ways, reverse=True)))
        for op, ways in by_op.items()
    ]


def binding_table(rows: Sequence[Mapping[str, str]]) -> Group:
    """A line for each row that breaks, then a table for each release.

    rows: `doctor.bindings.RowBinding` as dictionaries
    """
    from rich.console import Group
    from rich.text import Text

    broken = [row for row in rows if row["status"] == "breaks"]
    parts: list[Text | FittingTable] = []
    for row in broken:
        name = f"{row['library']} {row['version']}: {row['op']} {row['implementation']} "
        line = Text.assemble(name, ("breaks", STYLES["breaks"]), f": {row['reason']}")
        line.no_wrap, line.overflow = True, "ignore"
        parts.append(line)
    for library, version in dict.fromkeys((row["library"], row["version"]) for row in rows):
        mine = [row for row in rows if (row["library"], row["version"]) == (library, version)]
        counts = Counter(row["status"] for row in mine)
        summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        read = mine[0]["last_read"]
        newer = f"; newer than {read}, the last that was read" if read else ""
        parts += [Text(), Text(f"{library} {version}: {summary}{newer}", "bold")]
        if others := [row for row in mine if row not in broken]:
            parts.append(_release(others))
    return Group(*(parts if broken else parts[1:]))


def _release(rows: Sequence[Mapping[str, str]]) -> FittingTable:
    from rich.text import Text

    from harness.report.fitting_table import Column, FittingTable

    columns = [
        Column("op"),
        Column("implementation"),
        Column("calls"),
        Column("reason", wraps=True),
        Column("without", wraps=True, spare=1),
    ]
    cells: list[list[str | Text]] = []
    for row in rows:
        status = Text(row["status"], STYLES.get(row["status"], ""))
        cells.append([row["op"], row["implementation"], status, row["reason"], row["without"]])
    return FittingTable(columns, cells)
