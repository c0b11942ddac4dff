"""Lists of what there is: ops, implementations, cases, suites, linears, published figures, flags, recipes.

They are made without importing torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING

import kernels
from harness.catalogue.architectures import evidence
from harness.catalogue.flags import READ, Flag, catalogue
from harness.catalogue.published import figures
from harness.catalogue.recipes import Recipe, recipes
from harness.errors import UsageError
from harness.plan.select import choose_cases
from harness.report.terminal import WIDTH
from kernels.platform import Platform
from shapes.attention import Parallel
from shapes.case import text_of
from shapes.cases import R1
from shapes.linears import linears
from shapes.models import model
from shapes.suites import suite, suites

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from harness.report.fitting_table import FittingTable

ALL = "all"
LONG = 24
"""A column breaks into lines if one of its cells has more characters."""

FLAG_COLUMNS = {"name": 46, "default": 10, "read": 10, "platforms": 14, "ops": 20}
"""Column of the list of flags -> its width."""
INDENT = "    "

Row = Mapping[str, object]


@dataclass(frozen=True)
class Listing:
    rows: Sequence[Row]
    """The objects of JSON."""
    shown: Callable[[], RenderableType]
    """Makes the same for people."""


def listing(what: str, ops: Sequence[str], platform: Platform, suite_name: str | None) -> Listing:
    """what: a key of LISTS, `flags` or `recipes`. If the platform is not this machine, only its own flags and
    recipes are listed. Raises UsageError for an unknown suite."""
    if what == "flags":
        return _flags(ops, platform)
    if what == "recipes":
        listed = [r for r in recipes().values() if platform.here or r.platform == platform.kind]
        return Listing([asdict(recipe) for recipe in listed], lambda: _unbroken(recipes_text(listed)))
    rows = LISTS[what](ops, platform, suite_name)
    if what == "impls":
        return Listing(rows, lambda: _by_reason(rows))
    return Listing(rows, lambda: _by_suite(rows) if what == "cases" else _table(rows))


def of_case(op: str, text: str, platform: Platform) -> Listing:
    """The implementations of an op, with whether they take a case in any boundary. The reason of the others
    is the one that `run` gives for the widest boundary. Raises UsageError unless the text is one case."""
    cases = choose_cases(kernels.OPS[op], None, [text], None, platform.arch)
    if len(cases) != len(kernels.OPS[op].boundaries):
        raise UsageError(f"--case of list is one case; {text!r} is several")
    rows = []
    for row, implementation in zip(
        _implementations([op], platform, None), kernels.implementations(op), strict=True
    ):
        answers = [implementation.supports(case, platform) for case in cases]
        takes = any(answer.ok for answer in answers)
        rows.append({**row, "takes": takes, "reason": row["why not"] if takes else answers[-1].reason})
    shown = [row | {"runs": row["takes"], "why not": row["reason"], "near": row["runs"]} for row in rows]
    return Listing(rows, lambda: _by_reason(shown, f"take {cases[0].text}"))


def _table(rows: Sequence[Row]) -> FittingTable:
    from harness.report.fitting_table import Column, FittingTable

    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    columns = []
    for place, (name, value) in enumerate(rows[0].items() if rows else ()):
        long = any(len(row[place]) > LONG for row in cells)
        number = isinstance(value, int | float)
        columns.append(Column(name, right=number, wraps=long, spare=place if place > 1 else 0))
    return FittingTable(columns, cells)


def _by_reason(rows: Sequence[Row], verb: str = "can run") -> RenderableType:
    """Implementations: first a table of those that `verb` is true of, then the others by the reason why it is
    not. If all are of one op, the others have what they require beside them."""
    from rich.console import Group
    from rich.text import Text

    one_op = len({row["op"] for row in rows}) == 1
    boundaries = {str(row["boundary"]) for row in rows}
    named = ["implementation", "boundary"] if len(boundaries) > 1 else ["implementation"]
    here: list[Row] = []
    others: dict[str, list[Row]] = {}
    for row in rows:
        why_not = str(row["why not"])
        if row["runs"]:
            columns = named if one_op else ["op", *named]
            version = f"{row['provider']} {row['version']}".strip()
            shown = {name: row[name] for name in columns}
            here.append(shown | {"note": why_not.partition(" (")[0], "version": version})
        else:
            # The command has printed which machine this is.
            others.setdefault(why_not.partition("; this is ")[0], []).append(row)
    everywhere = "" if len(boundaries) > 1 else f"; all compute {boundaries.pop()}"
    can = Text(f"\n{len(here)} of {len(rows)} {verb}{everywhere}", "bold green")
    parts: list[RenderableType] = [can]
    if here:
        parts.append(_table(here))
    # Implementations that only the case keeps away come before those that the machine keeps away.
    for reason, group in sorted(others.items(), key=lambda of: (not of[1][0].get("near"), -len(of[1]))):
        parts += ["", Text(f"{len(group)} cannot: {reason}", "bold")]
        if one_op:
            parts.append(_table([{name: row[name] for name in (*named, "requires")} for row in group]))
        else:
            by_op = groupby(group, lambda row: row["op"])
            names = ((op, ", ".join(str(row["implementation"]) for row in of_op)) for op, of_op in by_op)
            parts.append(_table([{"op": op, "implementations": listed} for op, listed in names]))
    if not one_op:
        parts += ["", "with --op OP or --json: what each requires"]
    return Group(*parts)


def _by_suite(rows: Sequence[Row]) -> RenderableType:
    """The cases of each suite and op, below a line with the sizes that all of them have."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for (suite_name, op), group in groupby(rows, lambda row: (row["suite"], row["op"])):
        cases = list(group)
        sizes = [str(row["case"]).split() for row in cases]
        shared = [size for size in sizes[0] if len(cases) > 1 and all(size in case for case in sizes)]
        places = {str(row["place"]) for row in cases}
        about = [f"{suite_name} {op}"]
        about += [place for place in places if len(places) == 1 and place != suite_name]
        about += [f"all with {' '.join(shared)}"] if shared else []
        lines = [
            {
                "case": " ".join(size for size in case if size not in shared),
                "weight": f"{100 * float(str(row['weight'])):.1f} %",
                "place": "" if len(places) == 1 else row["place"],
            }
            for row, case in zip(cases, sizes, strict=True)
        ]
        parts += [Text("; ".join(about), "bold"), _table(lines), ""]
    return Group(*parts[:-1])


def _ops(ops: Sequence[str], platform: Platform, suite_name: str | None) -> list[Row]:
    return [
        {
            "op": op,
            "sizes": ", ".join(field.name for field in fields(kernels.OPS[op].Sizes)),
            "boundaries": ", ".join(kernels.OPS[op].boundaries),
            "implementations": len(kernels.implementations(op)),
            "baseline here": kernels.OPS[op].baseline[platform.kind],
        }
        for op in ops
    ]


def _implementations(ops: Sequence[str], platform: Platform, suite_name: str | None) -> list[Row]:
    rows: list[Row] = []
    for op in ops:
        for impl in kernels.implementations(op):
            support = impl.available(platform)
            how = "checked, not timed (interpreted)" if support.ok and impl.interpreted(platform) else ""
            rows.append(
                {
                    "op": op,
                    "implementation": impl.name,
                    "provider": impl.provider,
                    "version": impl.version if platform.here else "",
                    "boundary": ", ".join(impl.boundaries),
                    "runs": support.ok,
                    "why not": support.reason or how,
                    "requires": impl.requires,
                    "evidence": evidence().get(impl.name, {}),
                }
            )
    return rows


def _cases(ops: Sequence[str], platform: Platform, suite_name: str | None) -> list[Row]:
    name = suite_name or "smoke"
    if name not in (*suites(), ALL):
        raise UsageError(f"unknown suite {name!r}; suites: {', '.join(suites())}, or {ALL}")
    return [
        {
            "suite": name,
            "op": op,
            "case": kernels.OPS[op].case({**kernels.OPS[op].defaults(platform.arch), **c.sizes}).text,
            "weight": round(c.weight, 4),
            "place": c.place,
        }
        for name in (suites() if name == ALL else [name])
        for op in ops
        for c in suite(name).cases(op)
    ]


def _suites(ops: Sequence[str], platform: Platform, suite_name: str | None) -> list[Row]:
    return [{"suite": s.name, "description": s.description} for s in suites().values()]


def _linears(ops: Sequence[str], platform: Platform, suite_name: str | None) -> list[Row]:
    """Every linear of DeepSeek-R1 on one rank; block_scale_gemm computes those of kind fp8 block-scale."""
    return [
        {"parallel": parallel.text, **asdict(linear)}
        for parallel in (Parallel(tp=8), Parallel(tp=4), Parallel(dp=8, ep=8))
        for linear in linears(model(R1), parallel)
    ]


def _published(ops: Sequence[str], platform: Platform, suite_name: str | None) -> list[Row]:
    """Figures that others published, for all devices."""
    return [
        {
            "op": f.op,
            "sizes": text_of(f.sizes),
            "implementation": f.implementation,
            "device": f.device,
            "us": f.time_us,
            "TFLOPS": f.tflops,
            "source": f.source,
            "timed": f.method,
            "where": f.where,
        }
        for f in figures()
        if f.op in ops
    ]


LISTS: dict[str, Callable[[Sequence[str], Platform, str | None], list[Row]]] = {
    "ops": _ops,
    "impls": _implementations,
    "cases": _cases,
    "suites": _suites,
    "linears": _linears,
    "published": _published,
}
"""The lists that a table of their rows shows well."""


def _flags(ops: Sequence[str], platform: Platform) -> Listing:
    """If `ops` are not all ops, only their flags are listed."""
    listed = []
    for flag in catalogue().values():
        acts = platform.kind in flag.platforms and (not flag.archs or platform.arch in flag.archs)
        wanted = set(ops) == set(kernels.OPS) or set(ops) & set(flag.ops)
        if wanted and (platform.here or acts):
            listed.append(flag)
    rows = [asdict(flag) | {"ops": flag.ops} for flag in listed]
    return Listing(rows, lambda: _unbroken(flags_text(listed)))


def _unbroken(text: str) -> Text:
    """A text whose lines are broken already."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ignore")


def flags_text(flags: Sequence[Flag]) -> str:
    """The flags of each library: a line of facts for each, then its effect and what its values mean."""
    lines = [_flag_line({name: name for name in FLAG_COLUMNS} | {"name": "flag"})]
    for library, group in groupby(flags, lambda flag: flag.library):
        lines += ["", library]
        for flag in group:
            cells = {
                "name": flag.name,
                "default": _short("default", flag.default),
                "read": flag.read,
                "platforms": " ".join(flag.platforms),
                "ops": _short("ops", _flag_ops(flag)),
            }
            lines += [_flag_line(cells), *_wrapped(_flag_paragraphs(flag))]
    read = [f"read {when}: {text}" for when, text in READ.items() if any(f.read == when for f in flags)]
    return "\n".join([*lines, "", *read, "--json has what each entry was read in"])


def _flag_line(cells: Mapping[str, str]) -> str:
    return "".join(f"{cells[name]:<{width}}" for name, width in FLAG_COLUMNS.items()).rstrip()


def _flag_ops(flag: Flag) -> str:
    return "all" if set(flag.ops) == set(kernels.OPS) else ", ".join(flag.ops) or "none"


def _short(column: str, text: str) -> str:
    """The text if it fits into the column; else dots, and a paragraph below has the text."""
    return text if len(text) < FLAG_COLUMNS[column] else "..."


def _flag_paragraphs(flag: Flag) -> Iterator[str]:
    only = list(flag.archs)
    if flag.launch:
        only.append(f"{flag.launch} launches")
    yield f"{flag.effect} ({', '.join(only)} only)" if only else flag.effect
    for column, text in (("default", flag.default), ("ops", _flag_ops(flag))):
        if _short(column, text) != text:
            yield f"{column}: {text}"
    values = "; ".join(f"{value}: {meaning}" for value, meaning in flag.values.items())
    if values or flag.takes:
        yield f"{values}; or {flag.takes}" if values and flag.takes else values or flag.takes
    if flag.without:
        yield f"no effect on a kernel on one device: {flag.without}"
    for value, by_op in flag.chooses.items():
        rows = ", ".join(f"{op} by {' or '.join(names) or 'no row here'}" for op, names in by_op.items())
        yield f"{value} stands for {rows}"
    if flag.versions:
        yield f"versions: {flag.versions}"
    if flag.unconfirmed:
        yield f"not confirmed: {flag.unconfirmed}"


def recipes_text(recipes: Sequence[Recipe]) -> str:
    return "\n\n".join("\n".join(_recipe_lines(recipe)) for recipe in recipes)


def _recipe_lines(recipe: Recipe) -> Iterator[str]:
    yield f"{recipe.name}  ({recipe.platform} {recipe.arch})"
    options = f"and, not applied: {' '.join(recipe.options)}" if recipe.options else ""
    about = [f"{recipe.document}: {recipe.where}", recipe.engine, recipe.note, options]
    yield from _wrapped(filter(None, about))
    for variable in recipe.variables:
        setting = variable.name if variable.value is None else f"{variable.name}={variable.value}"
        yield f"{INDENT}{setting}{'  # ' + variable.note if variable.note else ''}"


def _wrapped(paragraphs: Iterable[str]) -> Iterator[str]:
    """The lines of each paragraph, indented."""
    for paragraph in paragraphs:
        yield from textwrap.wrap(
            paragraph, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )
