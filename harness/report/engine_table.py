"""What an engine runs for a deployment, as text and CSV."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from harness.engine import Changes, EngineView, Shape, as_given
from harness.report.fitting_table import Column, FittingTable
from harness.report.terminal import wrapped
from harness.report.text import Key, counted
from kernels.tables.lookup import what_decides
from shapes.case import text_of

SIZES_OF_A_STEP = ("m", "tokens", "batch", "ctx", "new", "prefix")
"""The sizes that differ between the steps of an engine; the others identify a layer."""
SIZES_NOT_SHOWN = ("fp8", "scales", "routing", "topk", "hidden", "dtype", "page", "model_len")
"""Sizes by which no entry of a table is selected, or that are the same in all deployments."""
NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Section:
    """A rich renderable: a heading and notes. Lines break between words only, so that names of kernels and
    files stay whole, and not between brackets, where names of SGLang's files have a blank."""

    heading: str
    notes: Sequence[str]  # of one or several lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.heading, "bold")
        for line in "\n".join(self.notes).splitlines():
            whole = re.sub(r"\[[^]]*\]", lambda bracket: bracket[0].replace(" ", NO_BREAK), line)
            indent = "    " + " " * (len(line) - len(line.lstrip()))
            text = wrapped(whole, "  ", indent, options.max_width).replace(NO_BREAK, " ")
            yield Text(text, no_wrap=True, overflow="ignore")


def engine_text(view: EngineView, entries: bool = False) -> RenderableType:
    """What an engine runs: what was asked, a summary for each op, a table, notes, and hints. The table has a
    row for each layer or, with `entries`, for each shape, with its entry."""
    file_numbers = _file_numbers(view)
    parts: list[RenderableType] = [
        *(Text(line) for line in [*heading(view), "", *summary(view), ""]),
        _entries(view, file_numbers) if entries else _layers(view),
    ]
    if entries and file_numbers:
        files = [f"{number}: {file}" for file, number in file_numbers.items()]
        parts += ["", Section("files of the entries", files)]
    for label, of_label in notes(view).items():
        parts += ["", Section(label, of_label)]
    hints = []
    if view.libraries and not entries:
        hints.append("--entries shows the entry of each shape")
    if any(shape.state == "fallback" for shape in view.shapes):
        hints += ["--write DIR writes the misses for the tuner",
                  "a miss is not yet a loss: `run` and `toggle` measure it"]  # fmt: skip
    if hints:
        parts += ["", Text("; ".join(hints))]
    return Group(*parts)


def notes(view: EngineView) -> dict[str, list[str]]:
    """Heading -> notes, of one or several lines; the largest shares of the time come first."""
    by_heading = {
        "known defects": _defects(view.shapes), "falls back": _fallbacks(view.shapes),
        "no row": _no_rows(view.shapes), "no table": _without_tables(view.shapes),
        "problems in the tables": [str(problem) for problem in view.problems],
        "note": [*_lookup_notes(view.shapes), *view.notes],
    }  # fmt: skip
    return {heading: lines for heading, lines in by_heading.items() if lines}


def heading(view: EngineView) -> list[str]:
    """Two lines: the engine, the device and the deployment; and the tables that were read."""
    asked, target = view.request, view.target
    units = "CUs" if target.arch.startswith("gfx") else "SMs"
    device = f"{target.arch}, {target.units} {units}" if target.units else target.arch
    options = [
        f"--tp {asked.tp}", f"--ep {asked.ep}" if asked.ep > 1 else "",
        "--dp-attention" if asked.dp_attention else "", f"--drafts {asked.drafts}" if asked.drafts else "",
        *(as_given(name, value) for name, value in asked.given.items()),
    ]  # fmt: skip
    libraries = ", ".join(f"{name} {version}" for name, version in view.libraries.items())
    served = f"{asked.model.name} {' '.join(filter(None, options))}, KV cache in {asked.kv}"
    tables = f"tables of {libraries}" if libraries else "no tuned table is asked"
    return [f"{view.release} on {view.device} ({device}): {served}", f"{tables}; untested on hardware"]


def summary(view: EngineView) -> list[str]:
    """A line for each op: its share of the time, and how many of the shapes that ask a table are tuned."""
    lines = []
    for op, shapes in _groups_by_share(view.shapes, lambda shape: shape.call.op):
        looked_up = [shape for shape in shapes if shape.asks_table]
        text = "no tuned table decides"
        if looked_up:
            tuned = [shape for shape in looked_up if shape.found.entry]
            tuned_share = _share(tuned) / _share(looked_up)
            text = f"{len(tuned)} of {len(looked_up)} shapes tuned, {tuned_share:.0%} of its time"
        lines.append(f"{op}: {_share(shapes):.0%} of the time; {text}")
    # The model's own calls have no ops that are `inapplicable`, as it computes something else instead.
    without_shapes = view.request.model.inapplicable.keys() - {shape.call.op for shape in view.shapes}
    return lines + [f"{op}: not in these shares, see the note" for op in sorted(without_shapes)]


def _layers(view: EngineView) -> FittingTable:
    """A row for each layer and each implementation that it runs, the largest shares of the time first."""
    columns = (
        Column("share", right=True), Column("op", spare=3), Column("layer"), Column("sizes"),
        Column("tokens"), Column("runs"), Column("decided in", spare=1), Column("tuned"),
        Column("not at", spare=2),
    )  # fmt: skip

    def layer_key(shape: Shape) -> tuple[str, str, str, str, str]:
        return shape.call.op, shape.call.place, layer_text(shape), shape.row, shape.decided_in

    rows = []
    for (op, place, sizes, row, decided_in), shapes in _groups_by_share(view.shapes, layer_key):
        looked_up = [shape for shape in shapes if shape.asks_table]
        misses = [shape for shape in looked_up if not shape.found.entry]
        tokens = [shape.tokens for shape in shapes]
        token_range = f"{min(tokens)}..{max(tokens)}" if min(tokens) < max(tokens) else str(tokens[0])
        tuned = f"{len(looked_up) - len(misses)} of {len(looked_up)}" if looked_up else ""
        # Where all are misses, `0 of N` says it.
        not_at = _listed(s.tokens for s in misses) if len(misses) < len(looked_up) else ""
        _, _, file = decided_in.rpartition("/")
        share = f"{_share(shapes):.1%}"
        rows.append((share, op, place, sizes, token_range, row or "no row", file, tuned, not_at))
    return FittingTable(columns, rows)


def _entries(view: EngineView, file_numbers: dict[str, int]) -> FittingTable:
    """A row for each shape; the largest shares of the time come first. The column `as` has the number of rows
    that the entry is for: the library runs the shape as if it had so many."""
    columns = (
        Column("share", right=True), Column("op", spare=2), Column("layer"), Column("sizes"), Column("runs"),
        Column("as", right=True), Column("us", right=True), Column("entry"),
        Column("kernel", spare=1, wraps=True),
    )  # fmt: skip
    rows = []
    for shape in by_share(view.shapes):
        entry = shape.found.entry
        entry_cells = ("", "", shape.state, "")
        if entry:
            us = f"{entry.us:.4g}" if entry.us else ""
            entry_cells = (str(entry.m), us, f"{file_numbers[entry.file]}:{entry.line}", entry.kernel)
        sizes = text_of({name: size for name, size in shape.sizes.items() if name not in SIZES_NOT_SHOWN})
        row = shape.row or "no row"
        rows.append((f"{shape.share:.2%}", shape.call.op, shape.call.place, sizes, row, *entry_cells))
    return FittingTable(columns, rows)


def _file_numbers(view: EngineView) -> dict[str, int]:
    """File of an entry -> the number that stands for it in a table, where its name would be too long."""
    files = dict.fromkeys(shape.found.entry.file for shape in by_share(view.shapes) if shape.found.entry)
    return {file: number for number, file in enumerate(files, 1)}


def _fallbacks(shapes: Sequence[Shape]) -> list[str]:
    """What runs for the shapes that have no entry. Tables whose misses all run one kernel share the note on
    that kernel; each other table has a note of its own, with a line for each kernel."""
    misses = [shape for shape in shapes if shape.state == "fallback"]
    kernels_of = defaultdict[str, set[str]](set)  # table -> what its misses run
    for shape in misses:
        kernels_of[shape.found.table].add(shape.found.fallback)

    def note_key(shape: Shape) -> tuple[str, str, str]:
        table, kernel = shape.found.table, shape.found.fallback
        return shape.call.op, shape.row, kernel if len(kernels_of[table]) == 1 else table

    lines = []
    for (op, row, _), group in _groups_by_share(misses, note_key):
        table, *others = dict.fromkeys(shape.found.table for shape in group)
        tables = f"{table} and {len(others)} more like it" if others else table
        count = counted(len(group), "shape")
        miss = f"{op} {row}, {_share(group):.1%} of the time, {count}: no entry in {tables}"
        fallbacks = _groups_by_share(group, lambda shape: shape.found.fallback)
        if len(fallbacks) == 1:
            [(fallback, _)] = fallbacks
            lines.append(f"{miss}; runs {fallback}")
        else:
            by_tokens = [f"  {_tokens(shapes)}: runs {fallback}" for fallback, shapes in fallbacks]
            lines.append("\n".join([miss, *by_tokens]))
    return lines


def _no_rows(shapes: Sequence[Shape]) -> list[str]:
    """Why the engine runs something that no implementation of the suite does."""
    groups = _groups_by_share((s for s in shapes if not s.row), lambda s: (s.call.op, s.why, s.decided_in))
    return [
        f"{op}, {_share(group):.1%} of the time: {why}{f' ({decided_in})' if decided_in else ''}"
        for (op, why, decided_in), group in groups
    ]


def _without_tables(shapes: Sequence[Shape]) -> list[str]:
    """What chooses the configurations of rows that have no table, if that is known."""
    groups = _groups_by_share((s for s in shapes if s.state == "no table"), lambda s: (s.call.op, s.row))
    deciding = [(op, row, what_decides(op, row)) for (op, row), _ in groups]
    return [f"{op} {row}: {text}" for op, row, text in deciding if text]


def _defects(shapes: Sequence[Shape]) -> list[str]:
    """The known defects of the rows that run."""
    pairs = [((defect, shape.call.op, shape.row), shape) for shape in shapes for defect in shape.defects]
    return [
        f"{op} {row}: {defect}: {counted(len(group), 'shape')}, {_share(group):.1%} of the time"
        for (defect, op, row), group in _pairs_by_share(pairs)
    ]


def _lookup_notes(shapes: Sequence[Shape]) -> list[str]:
    """The notes of look-ups, with the number of shapes that each is about. Notes that differ only in the
    numbers at their end, which are of tokens, become one line: `... for 1` and `... for 2, 4`."""
    pairs = []
    tokens = defaultdict[tuple[str, str], set[int]](set)  # by op and start of the note
    for shape in shapes:
        for note in shape.found.notes:
            start = re.sub(r"(?<= for )\d+(, \d+)*$", "", note)
            pairs.append(((shape.call.op, start), shape))
            tokens[shape.call.op, start].update(map(int, re.findall(r"\d+", note.removeprefix(start))))
    lines = []
    for (op, start), group in _pairs_by_share(pairs):
        count = f" ({len(group)} shapes)" if len(group) > 1 else ""
        lines.append(f"{op}: {start}{_listed(tokens[op, start])}{count}")
    return lines


def by_share(shapes: Iterable[Shape]) -> list[Shape]:
    """The shapes, those with the largest share of the time first."""
    return sorted(shapes, key=lambda shape: -shape.share)


def _share(shapes: Iterable[Shape]) -> float:
    return sum(shape.share for shape in shapes)


def _groups_by_share(shapes: Iterable[Shape], key: Callable[[Shape], Key]) -> list[tuple[Key, list[Shape]]]:
    """The shapes grouped by a key. The groups with the largest share of the time come first."""
    return _pairs_by_share((key(shape), shape) for shape in shapes)


def _pairs_by_share(pairs: Iterable[tuple[Key, Shape]]) -> list[tuple[Key, list[Shape]]]:
    """As `_groups_by_share`, from pairs of a key and a shape: a shape may be in several groups."""
    by_key = defaultdict[Key, list[Shape]](list)
    for key, shape in pairs:
        by_key[key].append(shape)
    return [(key, by_key[key]) for key in sorted(by_key, key=lambda key: -_share(by_key[key]))]


def layer_text(shape: Shape) -> str:
    """The sizes of the layer that calls a shape, as text."""
    other_sizes = (*SIZES_OF_A_STEP, *SIZES_NOT_SHOWN)
    return text_of({name: size for name, size in shape.sizes.items() if name not in other_sizes})


def _tokens(shapes: Iterable[Shape]) -> str:
    tokens = _listed(shape.tokens for shape in shapes)
    return f"{tokens} token" if tokens == "1" else f"{tokens} tokens"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))


CSV_COLUMNS = (
    "op", "sizes", "share", "row", "decided_in", "table", "entry_file", "entry_line", "entry_key", "entry_m",
    "entry_kernel", "entry_us", "fallback", "defects", "step", "place", "why", "notes",
)  # fmt: skip


def flat(shape: Shape) -> dict[str, Any]:
    """A value of a shape for each of CSV_COLUMNS: lists are joined, and what the shape lacks is None."""
    facts = shape.facts()
    entry = facts.pop("entry") or {}
    facts |= {f"entry_{name}": value for name, value in entry.items()}
    facts |= {name: "; ".join(facts[name]) for name in ("defects", "notes")}
    return {name: facts.get(name) for name in CSV_COLUMNS} | {"sizes": text_of(shape.sizes)}


def engine_csv(view: EngineView) -> str:
    import pandas

    rows = [flat(shape) for shape in view.shapes]
    return pandas.DataFrame(rows, columns=CSV_COLUMNS, dtype=object).to_csv(index=False)


def changes_text(changes: Changes) -> str:
    """The shapes that change between two versions of a library, the largest shares of the time first, and
    below each what runs before and after. Shapes of one layer that change alike share one entry."""
    library = changes.library
    versions = [view.libraries[library] for view in (changes.before, changes.after)]
    deployment, _ = heading(changes.after)
    counts = f"{len(changes.changes)} of {changes.asked} shapes run another kernel or configuration"
    scope = (
        "Entries of tables and what a miss runs are compared, not which kernels are called, nor their code."
    )
    lines = [deployment, f"{library} {' -> '.join(versions)}: {counts}", scope]
    pairs = [((f"{new.call.op} {new.call.place} {layer_text(new)}", old.runs, new.runs), new)
             for old, new in changes.changes]  # fmt: skip
    for (layer, before, after), shapes in _pairs_by_share(pairs):
        lines.append(f"{_share(shapes):6.1%}  {layer} at {_tokens(shapes)}")
        lines += [f"        - {before}", f"        + {after}"]
    return "\n".join(lines)
