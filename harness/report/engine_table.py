"""What an engine runs for a deployment, as text and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from harness.engine.changes import Change, Changes
from harness.engine.view import EngineView, Shape, dashed
from kernels.tables.lookup import decides_without
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
    said = notes(view)
    if entries and (files := _files(view)):
        said = {"files of the entries": [f"{number}: {file}" for file, number in files.items()], **said}
    for label, lines in said.items():
        parts += ["", Text(label, "bold"), *(Padding(Text(line), (0, 0, 0, 2)) for line in lines)]
    hints = [] if entries or not view.libraries else ["--entries shows the entry of each shape"]
    if any(shape.state == "fallback" for shape in view.shapes):
        hints.append("--write DIR writes the misses for the tuner")
        hints.append("a miss is not yet a loss: `run` and `toggle` measure it")
    if hints:
        parts += ["", Text("; ".join(hints))]
    return Group(*parts)


def notes(view: EngineView) -> dict[str, list[str]]:
    """What there is to know beside the table, by a heading; the largest shares of the time first."""
    labelled = {
        "known defects": _defects(view.shapes),
        "falls back": _fallbacks(view.shapes),
        "no row": _no_rows(view.shapes),
        "no table": _without_tables(view.shapes),
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
    how += [f"{dashed(name)}={value}" if value else dashed(name) for name, value in asked.given.items()]
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
        Column("as", right=True), Column("us", right=True), Column("entry"),
        Column("kernel", spare=1, wraps=True),
    )  # fmt: skip
    rows, files = [], _files(view)
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
                f"{files[entry.file]}:{entry.line}" if entry else shape.state,
                entry.kernel if entry else "",
            )
        )
    return FittingTable(columns, rows)


def _files(view: EngineView) -> dict[str, int]:
    """Those that entries are of, numbered, as their names are too long for a table."""
    found = sorted(view.shapes, key=lambda shape: -shape.share)
    files = dict.fromkeys(shape.found.entry.file for shape in found if shape.found and shape.found.entry)
    return {file: number for number, file in enumerate(files, 1)}


def _fallbacks(shapes: Sequence[Shape]) -> list[str]:
    """What runs for the shapes that a table holds nothing for; of several files together where all of it is
    the same."""
    misses = [shape for shape in shapes if shape.state == "fallback"]
    runs: dict[str, set[str]] = {}
    for shape in misses:
        runs.setdefault(_table(shape), set()).add(_fallback(shape))

    def alike(shape: Shape) -> tuple[str, str, str]:
        table = _table(shape)
        return shape.call.op, shape.row, _fallback(shape) if len(runs[table]) == 1 else table

    lines = []
    for (op, row, _), group in _grouped(misses, alike):
        first, *others = dict.fromkeys(_table(shape) for shape in group)
        table = f"{first} and {len(others)} more like it" if others else first
        share = sum(shape.share for shape in group)
        what = f"{op} {row}, {share:.1%} of the time, {_shapes(group)}: no entry in {table}; runs"
        fallbacks = _grouped(group, _fallback)
        if len(fallbacks) == 1:
            lines.append(f"{what} {fallbacks[0][0]}")
            continue
        lines.append(what)
        for fallback, same in fallbacks:
            tokens = _listed(shape.tokens for shape in same)
            lines.append(f"  {tokens} {'token' if tokens == '1' else 'tokens'}: {fallback}")
    return lines


def _table(shape: Shape) -> str:
    return shape.found.table if shape.found else ""


def _fallback(shape: Shape) -> str:
    return shape.found.fallback if shape.found else ""


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


def _without_tables(shapes: Sequence[Shape]) -> list[str]:
    """What decides instead, where it is known."""
    asked = [shape for shape in shapes if shape.state == "no table"]
    groups = _grouped(asked, lambda s: (s.call.op, s.row))
    return [f"{op} {row}: {text}" for (op, row), _ in groups if (text := decides_without(op, row))]


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
    lines = []
    for (op, start), group in _grouped(pairs, lambda pair: (pair[1].call.op, _without_tokens(pair[0]))):
        ends = {note.removeprefix(start) for note, _ in group}
        tokens = {int(number) for end in ends for number in end.split(",") if number}
        of = f" ({len(group)} shapes)" if len(group) > 1 else ""
        lines.append(f"{op}: {start}{_listed(tokens)}{of}")
    return lines


def _without_tokens(note: str) -> str:
    """A note without the numbers of tokens at its end, in which those of one layer differ."""
    return re.sub(r"(?<= for )\d+(, \d+)*$", "", note)


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


FACTS = (
    "op", "sizes", "share", "row", "decided_in", "table", "entry_file", "entry_line", "entry_key", "entry_m",
    "entry_kernel", "entry_us", "fallback", "defects", "step", "place", "why", "notes",
)  # fmt: skip


def flat(shape: Shape) -> dict[str, Any]:
    """FACTS of a shape; sizes as text, defects and notes separated by semicolons; None for what it lacks."""
    facts = shape.facts()
    entry = facts.pop("entry") or {}
    facts |= {f"entry_{name}": value for name, value in entry.items()}
    facts |= {name: "; ".join(facts[name]) for name in ("defects", "notes")}
    return {name: facts.get(name) for name in FACTS} | {"sizes": text_of(shape.sizes)}


def engine_csv(view: EngineView) -> str:
    """A line for each shape."""
    file = io.StringIO()
    writer = csv.DictWriter(file, FACTS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat(shape) for shape in view.shapes)
    return file.getvalue()


def changes_text(found: Changes) -> str:
    """The changed shapes by their share, those of one layer that change alike on a line."""
    a, b = (view.libraries.get(found.library, "unknown") for view in (found.before, found.after))
    lines = [
        f"{found.before.release} on {found.before.device}: {found.library} {a} -> {b}: "
        f"{len(found.changes)} of {found.asked} shapes run otherwise",
        "compared: entries of tables and what a miss runs; not which kernels are called, nor their code",
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
