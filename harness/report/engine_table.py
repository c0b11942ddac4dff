"""What an engine runs for a deployment, as text and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from harness.engine.changes import Change, Changes
from harness.engine.view import EngineView, Shape
from shapes.case import Size, text_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.report.fitting_table import FittingTable

Item = TypeVar("Item", Shape, tuple[str, Shape])
Key = TypeVar("Key", bound=Hashable)

TOKENS = ("m", "tokens", "batch", "ctx", "new", "prefix")
"""Sizes that differ from step to step; the others tell a layer."""

UNSAID = ("fp8", "scales", "routing", "topk", "hidden", "dtype", "page", "model_len")
"""Sizes that no table is asked by, or that a deployment does not change."""


def engine_text(view: EngineView, entries: bool = False) -> RenderableType:
    """entries: each shape on a line, with what its table holds."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [
        *(Text(line) for line in [*heading(view), "", *summary(view), ""]),
        _entries(view) if entries else _layers(view),
    ]
    for label, lines in notes(view).items():
        parts += ["", Text(label, "bold"), *(Padding(Text(line), (0, 0, 0, 2)) for line in lines)]
    return Group(*parts)


def notes(view: EngineView) -> dict[str, list[str]]:
    """What there is to know beside the table, by a heading; the largest shares of the time first."""
    labelled = {
        "falls back": _fallbacks(view.shapes),
        "no row": _no_rows(view.shapes),
        "known defects": _defects(view.shapes),
        "in the tables": [str(problem) for problem in view.problems],
        "note": [*_odd(view.shapes), *view.notes],
    }
    return {label: lines for label, lines in labelled.items() if lines}


def heading(view: EngineView) -> list[str]:
    asked, target = view.request, view.target
    units = "CUs" if target.arch.startswith("gfx") else "SMs"
    device = f"{target.arch}, {target.units} {units}" if target.units else target.arch
    how = [f"--tp {asked.tp}"]
    if asked.ep > 1:
        how.append(f"--ep {asked.ep}")
    if asked.dp_attention:
        how.append("--dp-attention")
    for name, value in asked.given.items():
        flag = f"--{name}" if name.islower() else name
        how.append(f"{flag}={value}" if value else flag)
    read = ", ".join(f"{name} {version}" for name, version in view.libraries.items())
    served = f"{asked.model.name} {' '.join(how)}, KV cache in {asked.kv}"
    tables = f"tables of {read}" if read else "no tuned table is asked"
    return [f"{view.release} on {view.device} ({device}): {served}", f"{tables}; untested on hardware"]


def summary(view: EngineView) -> list[str]:
    """Of each op whose kernels look into a table how many shapes are tuned, and how much of the time."""
    lines = []
    for op, shapes in _grouped(view.shapes, lambda shape: shape.call.op):
        asked = [shape for shape in shapes if shape.found]
        share = sum(shape.share for shape in shapes)
        if not asked:
            lines.append(f"{op}: {share:.0%} of the time; no tuned table decides")
            continue
        tuned = [shape for shape in asked if shape.state == "tuned"]
        part = sum(shape.share for shape in tuned) / (sum(shape.share for shape in asked) or 1.0)
        counts = f"{len(tuned)} of {len(asked)} shapes tuned, {part:.0%} of its time"
        lines.append(f"{op}: {share:.0%} of the time; {counts}")
    return lines


def _layers(view: EngineView) -> FittingTable:
    """A line for each layer that one row serves, by its share."""
    from harness.report.fitting_table import Column, FittingTable

    columns = (
        Column("share", right=True), Column("op", spare=2), Column("layer"), Column("sizes"),
        Column("tokens"), Column("runs"), Column("decided in", spare=1), Column("tuned"), Column("not at"),
    )  # fmt: skip
    groups = _grouped(view.shapes, lambda s: (s.call.op, s.call.place, layer_text(s), s.row, s.decided_in))
    rows = []
    for (op, place, sizes, row, decided), shapes in groups:
        asked = [shape for shape in shapes if shape.found]
        misses = [shape for shape in asked if shape.state == "fallback"]
        rows.append(
            (
                f"{sum(shape.share for shape in shapes):.1%}",
                op,
                place,
                sizes,
                _span([shape.tokens for shape in shapes]),
                row or "no row",
                decided.rpartition("/")[2],
                f"{len(asked) - len(misses)} of {len(asked)}" if asked else "",
                _listed(shape.tokens for shape in misses) if len(misses) < len(asked) else "",
            )
        )
    return FittingTable(columns, rows)


def _entries(view: EngineView) -> FittingTable:
    """Each shape, by its share."""
    from harness.report.fitting_table import Column, FittingTable

    columns = (
        Column("share", right=True), Column("op", spare=2), Column("layer"), Column("sizes"), Column("runs"),
        Column("as", right=True), Column("us", right=True), Column("kernel", wraps=True),
        Column("entry", spare=1),
    )  # fmt: skip
    rows = []
    for shape in sorted(view.shapes, key=lambda shape: -shape.share):
        entry = shape.found and shape.found.entry
        rows.append(
            (
                f"{shape.share:.2%}",
                shape.call.op,
                shape.call.place,
                _said(shape.sizes),
                shape.row or "no row",
                str(entry.m) if entry else "",
                f"{entry.us:.4g}" if entry and entry.us else "",
                entry.kernel if entry else shape.state,
                (f"{entry.file}:{entry.line}" if entry.line else entry.file) if entry else "",
            )
        )
    return FittingTable(columns, rows)


def _fallbacks(shapes: Sequence[Shape]) -> list[str]:
    """Of each table that holds nothing for some shapes, what runs for those instead."""
    lines = []
    misses = [shape for shape in shapes if shape.state == "fallback"]
    for (op, row, table), group in _grouped(
        misses, lambda s: (s.call.op, s.row, s.found.table if s.found else "")
    ):
        share = sum(shape.share for shape in group)
        what = f"{op} {row}, {share:.1%} of the time, {_shapes(group)}"
        lines.append(f"{what}: no entry in {table}; runs")
        for fallback, alike in _grouped(group, lambda s: s.found.fallback if s.found else ""):
            tokens = _listed(shape.tokens for shape in alike)
            lines.append(f"  {tokens} {'token' if tokens == '1' else 'tokens'}: {fallback}")
    return lines


def _no_rows(shapes: Sequence[Shape]) -> list[str]:
    groups = _grouped(
        [shape for shape in shapes if not shape.row],
        lambda s: (s.call.op, s.entry.why if s.entry else "the engine's choice is not known", s.decided_in),
    )
    return [
        f"{op}, {sum(shape.share for shape in group):.1%} of the time: {why}"
        + (f" ({decided})" if decided else "")
        for (op, why, decided), group in groups
    ]


def _defects(shapes: Sequence[Shape]) -> list[str]:
    pairs = [(defect, shape) for shape in shapes for defect in shape.defects]
    groups = _grouped(pairs, lambda pair: (pair[0], pair[1].call.op, pair[1].row))
    return [
        f"{op} {row}: {defect}: {_shapes(group)}, {sum(shape.share for _, shape in group):.1%} of the time"
        for (defect, op, row), group in groups
    ]


def _odd(shapes: Sequence[Shape]) -> list[str]:
    """What look-ups noted, with how many shapes it concerns."""
    pairs = [(note, shape) for shape in shapes if shape.found for note in shape.found.notes]
    return [
        f"{op}: {note}" + (f" ({len(group)} shapes)" if len(group) > 1 else "")
        for (op, note), group in _grouped(pairs, lambda pair: (pair[1].call.op, pair[0]))
    ]


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> list[tuple[Key, list[Item]]]:
    """By key, the groups with the largest share of the time first."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)

    def share(group: tuple[Key, list[Item]]) -> float:
        return sum(item.share if isinstance(item, Shape) else item[1].share for item in group[1])

    return sorted(groups.items(), key=share, reverse=True)


def layer_text(shape: Shape) -> str:
    return text_of({k: v for k, v in shape.sizes.items() if k not in (*TOKENS, *UNSAID)})


def _said(sizes: Mapping[str, Size]) -> str:
    return text_of({name: value for name, value in sizes.items() if name not in UNSAID})


def _shapes(group: Sequence[object]) -> str:
    return "1 shape" if len(group) == 1 else f"{len(group)} shapes"


def _span(tokens: Sequence[int]) -> str:
    return f"{min(tokens)}..{max(tokens)}" if min(tokens) < max(tokens) else str(tokens[0])


def _listed(tokens: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(tokens))))


def engine_csv(view: EngineView) -> str:
    """A line for each shape; sizes as text, defects and notes separated by semicolons."""
    file = io.StringIO()
    names = (
        "op", "sizes", "share", "row", "decided_in", "table", "entry_file", "entry_line", "entry_key",
        "entry_m", "entry_kernel", "entry_us", "fallback", "defects", "step", "place", "why", "notes",
    )  # fmt: skip
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for shape in view.shapes:
        facts = shape.facts()
        entry = facts.pop("entry") or {}
        facts |= {f"entry_{name}": value for name, value in entry.items()}
        facts |= {name: "; ".join(facts[name]) for name in ("defects", "notes")} | {
            "sizes": text_of(shape.sizes)
        }
        writer.writerow(facts)
    return file.getvalue()


def changes_text(found: Changes) -> str:
    """The changed shapes by their share, those of one layer that change alike on a line."""
    a, b = (view.libraries.get(found.library, "unknown") for view in (found.before, found.after))
    lines = [
        f"{found.before.release} on {found.before.device}: {found.library} {a} -> {b}: "
        f"{len(found.changes)} of {found.asked} shapes run otherwise"
    ]
    groups: dict[tuple[str, str, str, str], list[Change]] = {}
    for change in found.changes:
        call = change.of.call
        groups.setdefault((call.op, call.place, layer_text(change.of), change.text), []).append(change)
    for (op, place, layer, text), group in groups.items():
        tokens = ", ".join(str(change.of.tokens) for change in group)
        share = sum(change.of.share for change in group)
        lines.append(f"{share:6.1%}  {op} {place} {layer}, at {tokens}: {text}")
    return "\n".join(lines)
