"""What an engine runs for a deployment, as text and CSV."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from harness.engine import Changes, EngineView, Shape, as_given
from harness.report.fitting_table import Column, FittingTable
from harness.report.text import counted
from kernels.tables.lookup import decides_without
from shapes.case import text_of

Key = TypeVar("Key", bound=Hashable)

SIZES_OF_A_STEP = ("m", "tokens", "batch", "ctx", "new", "prefix")
"""The sizes that differ between steps; the others identify a layer."""

SIZES_NOT_SHOWN = ("fp8", "scales", "routing", "topk", "hidden", "dtype", "page", "model_len")
"""These sizes select no entry of a table, or they are the same in all deployments."""

NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Section:
    """A rich renderable: a heading and notes. Lines break between words only, so that names of kernels and
    files stay whole; names of SGLang's files have a blank between brackets."""

    heading: str
    notes: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.heading, "bold")
        for line in "\n".join(self.notes).splitlines():
            whole = re.sub(r"\[[^]]*\]", lambda bracket: bracket[0].replace(" ", NO_BREAK), line)
            indent = "    " + " " * (len(line) - len(line.lstrip()))
            wrapper = textwrap.TextWrapper(options.max_width, "  ", indent)
            wrapper.break_long_words = wrapper.break_on_hyphens = False
            yield Text(wrapper.fill(whole).replace(NO_BREAK, " "), no_wrap=True, overflow="ignore")


def engine_text(view: EngineView, entries: bool = False) -> RenderableType:
    """entries: the table has a row for each shape, with its entry, instead of a row for each layer."""
    files = _files(view)
    parts: list[RenderableType] = [
        *(Text(line) for line in [*heading(view), "", *summary(view), ""]),
        _entries(view, files) if entries else _layers(view),
    ]
    labelled = notes(view)
    if entries and files:
        listed = [f"{number}: {file}" for file, number in files.items()]
        labelled = {"files of the entries": listed} | labelled
    for label, lines in labelled.items():
        parts += ["", Section(label, lines)]
    hints = ["--entries shows the entry of each shape"] if view.libraries and not entries else []
    if any(shape.state == "fallback" for shape in view.shapes):
        hints.append("--write DIR writes the misses for the tuner")
        hints.append("a miss is not yet a loss: `run` and `toggle` measure it")
    if hints:
        parts += ["", Text("; ".join(hints))]
    return Group(*parts)


def notes(view: EngineView) -> dict[str, list[str]]:
    """Heading -> notes, of one or several lines; the largest shares of the time come first."""
    labelled = {
        "known defects": _defects(view.shapes),
        "falls back": _fallbacks(view.shapes),
        "no row": _no_rows(view.shapes),
        "no table": _without_tables(view.shapes),
        "problems in the tables": [str(problem) for problem in view.problems],
        "note": [*_lookup_notes(view.shapes), *view.notes],
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
    if asked.drafts:
        how.append(f"--drafts {asked.drafts}")
    how += [as_given(name, value) for name, value in asked.given.items()]
    read = ", ".join(f"{name} {version}" for name, version in view.libraries.items())
    served = f"{asked.model.name} {' '.join(how)}, KV cache in {asked.kv}"
    tables = f"tables of {read}" if read else "no tuned table is asked"
    return [f"{view.release} on {view.device} ({device}): {served}", f"{tables}; untested on hardware"]


def summary(view: EngineView) -> list[str]:
    """For each op: how many of the shapes that look into a table are tuned, and what part of their time."""
    lines = []
    for op, shapes in _by_key(view.shapes, lambda shape: shape.call.op):
        asked = [shape for shape in shapes if shape.asks_table]
        text = "no tuned table decides"
        if asked:
            tuned = [shape for shape in asked if shape.found.entry]
            part = _share(tuned) / _share(asked)
            text = f"{len(tuned)} of {len(asked)} shapes tuned, {part:.0%} of its time"
        lines.append(f"{op}: {_share(shapes):.0%} of the time; {text}")
    left_out = view.request.model.unheld.keys() - {shape.call.op for shape in view.shapes}
    return lines + [f"{op}: not in these shares, see the note" for op in sorted(left_out)]


def _layers(view: EngineView) -> FittingTable:
    """A row for each layer that one implementation serves; the largest shares of the time come first."""
    columns = (
        Column("share", right=True), Column("op", spare=3), Column("layer"), Column("sizes"),
        Column("tokens"), Column("runs"), Column("decided in", spare=1), Column("tuned"),
        Column("not at", spare=2),
    )  # fmt: skip

    def layer(shape: Shape) -> tuple[str, str, str, str, str]:
        return shape.call.op, shape.call.place, layer_text(shape), shape.row, shape.decided_in

    rows = []
    for (op, place, sizes, row, decided), shapes in _by_key(view.shapes, layer):
        asked = [shape for shape in shapes if shape.asks_table]
        misses = [shape for shape in asked if not shape.found.entry]
        tokens = [shape.tokens for shape in shapes]
        span = f"{min(tokens)}..{max(tokens)}" if min(tokens) < max(tokens) else str(tokens[0])
        tuned = f"{len(asked) - len(misses)} of {len(asked)}" if asked else ""
        not_at = _listed(shape.tokens for shape in misses) if len(misses) < len(asked) else ""
        file = decided.rpartition("/")[2]
        share = f"{_share(shapes):.1%}"
        rows.append((share, op, place, sizes, span, row or "no row", file, tuned, not_at))
    return FittingTable(columns, rows)


def _entries(view: EngineView, files: dict[str, int]) -> FittingTable:
    """A row for each shape; the largest shares of the time come first."""
    columns = (
        Column("share", right=True), Column("op", spare=2), Column("layer"), Column("sizes"), Column("runs"),
        Column("as", right=True), Column("us", right=True), Column("entry"),
        Column("kernel", spare=1, wraps=True),
    )  # fmt: skip
    rows = []
    for shape in by_share(view.shapes):
        entry = shape.found.entry
        cells = ("", "", shape.state, "")
        if entry:
            us = f"{entry.us:.4g}" if entry.us else ""
            cells = (str(entry.m), us, f"{files[entry.file]}:{entry.line}", entry.kernel)
        shown = {name: size for name, size in shape.sizes.items() if name not in SIZES_NOT_SHOWN}
        row = shape.row or "no row"
        rows.append((f"{shape.share:.2%}", shape.call.op, shape.call.place, text_of(shown), row, *cells))
    return FittingTable(columns, rows)


def _files(view: EngineView) -> dict[str, int]:
    """File of an entry -> its number, which stands for it in a table, as the names are too long."""
    files = dict.fromkeys(shape.found.entry.file for shape in by_share(view.shapes) if shape.found.entry)
    return {file: number for number, file in enumerate(files, 1)}


def _fallbacks(shapes: Sequence[Shape]) -> list[str]:
    """What runs for the shapes without an entry. Tables whose misses all run the same share one note."""
    misses = [shape for shape in shapes if shape.state == "fallback"]
    fallbacks_of: dict[str, set[str]] = {}
    for shape in misses:
        fallbacks_of.setdefault(shape.found.table, set()).add(shape.found.fallback)

    def note_key(shape: Shape) -> tuple[str, str, str]:
        table = shape.found.table
        shared = shape.found.fallback if len(fallbacks_of[table]) == 1 else table
        return shape.call.op, shape.row, shared

    lines = []
    for (op, row, _), group in _by_key(misses, note_key):
        table, *others = dict.fromkeys(shape.found.table for shape in group)
        more = f" and {len(others)} more like it" if others else ""
        count = counted(len(group), "shape")
        what = f"{op} {row}, {_share(group):.1%} of the time, {count}: no entry in {table}{more}"
        fallbacks = _by_key(group, lambda shape: shape.found.fallback)
        if len(fallbacks) == 1:
            lines.append(f"{what}; runs {fallbacks[0][0]}")
        else:
            by_tokens = [f"  {_tokens(shapes)}: runs {fallback}" for fallback, shapes in fallbacks]
            lines.append("\n".join([what, *by_tokens]))
    return lines


def _no_rows(shapes: Sequence[Shape]) -> list[str]:
    """Why the engine runs something that no implementation of the suite does."""
    without = [shape for shape in shapes if not shape.row]
    lines = []
    for (op, why, decided), group in _by_key(without, lambda s: (s.call.op, s.why, s.decided_in)):
        where = f" ({decided})" if decided else ""
        lines.append(f"{op}, {_share(group):.1%} of the time: {why}{where}")
    return lines


def _without_tables(shapes: Sequence[Shape]) -> list[str]:
    """What decides where no table does, if that is known."""
    without = [shape for shape in shapes if shape.state == "no table"]
    groups = _by_key(without, lambda shape: (shape.call.op, shape.row))
    return [f"{op} {row}: {text}" for (op, row), _ in groups if (text := decides_without(op, row))]


def _defects(shapes: Sequence[Shape]) -> list[str]:
    pairs = [((defect, shape.call.op, shape.row), shape) for shape in shapes for defect in shape.defects]
    return [
        f"{op} {row}: {defect}: {counted(len(group), 'shape')}, {_share(group):.1%} of the time"
        for (defect, op, row), group in _grouped(pairs)
    ]


def _lookup_notes(shapes: Sequence[Shape]) -> list[str]:
    """The notes of look-ups, and the number of shapes that each is about. Notes that differ only in the
    numbers of tokens at their end become one line."""
    pairs = []
    tokens: dict[tuple[str, str], set[int]] = {}
    for shape in shapes:
        for note in shape.found.notes:
            start = re.sub(r"(?<= for )\d+(, \d+)*$", "", note)
            key = shape.call.op, start
            pairs.append((key, shape))
            tokens.setdefault(key, set()).update(map(int, re.findall(r"\d+", note.removeprefix(start))))
    lines = []
    for (op, start), group in _grouped(pairs):
        count = f" ({len(group)} shapes)" if len(group) > 1 else ""
        lines.append(f"{op}: {start}{_listed(tokens[op, start])}{count}")
    return lines


def by_share(shapes: Iterable[Shape]) -> list[Shape]:
    return sorted(shapes, key=lambda shape: -shape.share)


def _share(shapes: Iterable[Shape]) -> float:
    return sum(shape.share for shape in shapes)


def _by_key(shapes: Iterable[Shape], key: Callable[[Shape], Key]) -> list[tuple[Key, list[Shape]]]:
    return _grouped((key(shape), shape) for shape in shapes)


def _grouped(pairs: Iterable[tuple[Key, Shape]]) -> list[tuple[Key, list[Shape]]]:
    """Shapes by their key; the groups with the largest share of the time come first."""
    groups: dict[Key, list[Shape]] = {}
    for key, shape in pairs:
        groups.setdefault(key, []).append(shape)
    return sorted(groups.items(), key=lambda group: -_share(group[1]))


def layer_text(shape: Shape) -> str:
    """The sizes of the layer that calls a shape."""
    left_out = (*SIZES_OF_A_STEP, *SIZES_NOT_SHOWN)
    return text_of({name: size for name, size in shape.sizes.items() if name not in left_out})


def _tokens(shapes: Iterable[Shape]) -> str:
    tokens = _listed(shape.tokens for shape in shapes)
    return f"{tokens} token" if tokens == "1" else f"{tokens} tokens"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))


FACTS = (
    "op", "sizes", "share", "row", "decided_in", "table", "entry_file", "entry_line", "entry_key", "entry_m",
    "entry_kernel", "entry_us", "fallback", "defects", "step", "place", "why", "notes",
)  # fmt: skip
"""The columns of CSV."""


def flat(shape: Shape) -> dict[str, Any]:
    """FACTS of a shape: sizes as text, defects and notes separated by semicolons, None for what it lacks."""
    facts = shape.facts()
    entry = facts.pop("entry") or {}
    facts |= {f"entry_{name}": value for name, value in entry.items()}
    facts |= {name: "; ".join(facts[name]) for name in ("defects", "notes")}
    return {name: facts.get(name) for name in FACTS} | {"sizes": text_of(shape.sizes)}


def engine_csv(view: EngineView) -> str:
    import pandas

    rows = [flat(shape) for shape in view.shapes]
    return pandas.DataFrame(rows, columns=FACTS, dtype=object).to_csv(index=False)


def changes_text(compared: Changes) -> str:
    """The changed shapes, the largest shares of the time first, and below each what runs before and after.
    Shapes of one layer that change alike share one entry."""
    library = compared.library
    versions = [view.libraries[library] for view in (compared.before, compared.after)]
    lines = [
        heading(compared.after)[0],
        f"{library} {' -> '.join(versions)}: {len(compared.changes)} of {compared.asked} shapes run another "
        "kernel or configuration",
        "Entries of tables and what a miss runs are compared, not which kernels are called, nor their code.",
    ]
    pairs = []
    for old, new in compared.changes:
        layer = f"{new.call.op} {new.call.place} {layer_text(new)}"
        pairs.append(((layer, old.runs, new.runs), new))
    for (layer, before, after), shapes in _grouped(pairs):
        lines.append(f"{_share(shapes):6.1%}  {layer} at {_tokens(shapes)}")
        lines += [f"        - {before}", f"        + {after}"]
    return "\n".join(lines)
