"""Lists of what there is: ops, implementations, cases, suites, linears, published figures, flags, recipes.

They are made without importing torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

import kernels
from harness.catalogue.architectures import evidence
from harness.catalogue.flags import READ, Flag, catalogue
from harness.catalogue.published import figures
from harness.catalogue.recipes import Recipe, recipes, setters
from harness.errors import UsageError
from harness.plan.select import choose_cases
from harness.report.fitting_table import table_of
from harness.report.terminal import WIDTH
from kernels.platform import KINDS, Platform
from shapes.attention import Parallel
from shapes.case import text_of
from shapes.cases import R1
from shapes.linears import linears
from shapes.models import model
from shapes.names import unknown
from shapes.suites import suite, suites

ALL = "all"
FLAG_COLUMNS = {"flag": 46, "default": 10, "read": 10, "platforms": 14, "ops": 20}
"""Column of the list of flags -> its width."""
INDENT = "    "
FIRST = 10  # how many flags of an op the list of flags begins with

Row = Mapping[str, object]


Listing = tuple[Sequence[Row], Callable[[], RenderableType]]
"""The objects of JSON; and a function that makes the same for people."""


def listing(
    what: str, ops: Sequence[str], platform: Platform, suite_name: str | None, every: bool = False
) -> Listing:
    """One of the lists that the command `list` names. If the platform is not this machine, only its own flags
    and recipes are listed. Raises UsageError for an unknown suite.

    every: for people, too, all flags and not only those that recipes and guides set
    """
    if what == "impls":
        rows = _implementations(ops, platform)
        verb = "can run" if platform.here else f"are rows for {platform.arch}, none of them tried"
        return rows, lambda: _by_reason(rows, platform, verb)
    if what == "cases":
        rows = _cases(ops, platform, suite_name or "smoke")
        return rows, lambda: _by_suite(rows)
    if what == "flags":
        flags = _flags(ops, platform)
        rows = [asdict(flag) | {"ops": flag.ops} for flag in flags]
        return rows, lambda: "\n".join(
            [*_first_flags(ops, platform), *([flags_text(flags)] if every else [])]
        )
    if what == "recipes":
        listed = [r for r in recipes().values() if platform.here or r.platform == platform.kind]
        text = "\n\n".join("\n".join(_recipe_lines(recipe)) for recipe in listed)
        return [asdict(recipe) for recipe in listed], lambda: text
    if what == "ops":
        rows = [
            {
                "op": op,
                "sizes": ", ".join(field.name for field in fields(kernels.OPS[op].Sizes)),
                "boundaries": ", ".join(kernels.OPS[op].boundaries),
                "implementations": len(kernels.implementations(op)),
                "baseline here": kernels.OPS[op].baseline[platform.kind],
            }
            for op in ops
        ]
    elif what == "suites":
        rows = [{"suite": s.name, "description": s.description} for s in suites().values()]
    elif what == "linears":
        # Every linear of DeepSeek-R1 on one rank; block_scale_gemm computes those of kind fp8 block-scale.
        rows = [
            {"parallel": parallel.text, **asdict(linear)}
            for parallel in (Parallel(tp=8), Parallel(tp=4), Parallel(dp=8, ep=8))
            for linear in linears(model(R1), parallel)
        ]
    else:  # published: for all devices
        rows = [
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
    return rows, lambda: _by_source(rows) if what == "published" else table_of(rows)


def of_case(op: str, text: str, platform: Platform) -> Listing:
    """The implementations of an op, with whether they take a case in any boundary. The reason of the others
    is the one that `run` gives for the widest boundary. Raises UsageError unless the text is one case."""
    cases = choose_cases(kernels.OPS[op], None, [text], None, platform.arch)
    if len(cases) != len(kernels.OPS[op].boundaries):
        raise UsageError(f"--case of list is one case; {text!r} is several")
    rows = []
    for row, implementation in zip(
        _implementations([op], platform), kernels.implementations(op), strict=True
    ):
        answers = [implementation.supports(case, platform) for case in cases]
        takes = any(answer.ok for answer in answers)
        rows.append({**row, "takes": takes, "reason": row["why not"] if takes else answers[-1].reason})
    shown = [row | {"runs": row["takes"], "why not": row["reason"], "near": row["runs"]} for row in rows]
    return rows, lambda: _by_reason(shown, platform, f"take {cases[0].text}")


def _implementations(ops: Sequence[str], platform: Platform) -> list[Row]:
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


def _by_reason(rows: Sequence[Row], platform: Platform, verb: str) -> RenderableType:
    """Implementations: first a table of those that `verb` is true of, with versions where the platform
    is here, then the others by the reason why it is not. If all are of one op, what is not known to run has
    what it requires beside it."""
    one_op = len({row["op"] for row in rows}) == 1
    boundaries = {str(row["boundary"]) for row in rows}
    named = ["implementation", "boundary"] if len(boundaries) > 1 else ["implementation"]
    here: list[Row] = []
    others: dict[str, list[Row]] = {}
    for row in rows:
        why_not = str(row["why not"])
        if row["runs"]:
            shown = {name: row[name] for name in (named if one_op else ["op", *named])}
            version = f"{row['provider']} {row['version']}".strip()
            about = {"note": why_not.partition(" (")[0], "version": version}
            required = {"requires": row["requires"]} if one_op else {}
            here.append(shown | (about if platform.here else required))
        else:
            # The command has printed which machine this is.
            others.setdefault(why_not.partition("; this is ")[0], []).append(row)
    everywhere = "" if len(boundaries) > 1 else f"; all compute {boundaries.pop()}"
    parts: list[RenderableType] = [Text(f"\n{len(here)} of {len(rows)} {verb}{everywhere}", "bold green")]
    if here:
        parts.append(table_of(here))
    # Implementations that only the case keeps away come before those that the machine keeps away.
    for reason, group in sorted(others.items(), key=lambda of: (not of[1][0].get("near"), -len(of[1]))):
        parts += ["", Text(f"{len(group)} cannot: {reason}", "bold")]
        if one_op:
            lines: list[Row] = [{name: row[name] for name in (*named, "requires")} for row in group]
        else:
            lines = [
                {"op": op, "implementations": ", ".join(str(row["implementation"]) for row in of_op)}
                for op, of_op in groupby(group, lambda row: row["op"])
            ]
        parts.append(table_of(lines))
    if not one_op:
        parts += ["", "with --op OP or --json: what each requires"]
    return Group(*parts)


def _cases(ops: Sequence[str], platform: Platform, suite_name: str) -> list[Row]:
    if suite_name not in (*suites(), ALL):
        raise UsageError(unknown("suite", suite_name, [*suites(), ALL], "list suites"))
    return [
        {
            "suite": name,
            "op": op,
            "case": kernels.OPS[op].case({**kernels.OPS[op].defaults(platform.arch), **c.sizes}).text,
            "weight": round(c.weight, 4),
            "place": c.place,
        }
        for name in (suites() if suite_name == ALL else [suite_name])
        for op in ops
        for c in suite(name).cases(op)
    ]


def _by_suite(rows: Sequence[Row]) -> RenderableType:
    """The cases of each suite and op, below a line with the sizes that all of them have."""
    parts: list[RenderableType] = []
    for (suite_name, op), group in groupby(rows, lambda row: (row["suite"], row["op"])):
        cases = list(group)
        sizes = [str(row["case"]).split() for row in cases]
        shared = [size for size in sizes[0] if len(cases) > 1 and all(size in case for case in sizes)]
        places = {str(row["place"]) for row in cases}
        about = [f"{suite_name} {op}"]
        about += [place for place in places if len(places) == 1 and place != suite_name]
        if shared:
            about.append(f"all with {' '.join(shared)}")
        lines = [
            {
                "case": " ".join(size for size in case if size not in shared),
                "weight": f"{100 * float(str(row['weight'])):.1f} %",
                "place": "" if len(places) == 1 else row["place"],
            }
            for row, case in zip(cases, sizes, strict=True)
        ]
        parts += [Text("; ".join(about), "bold"), table_of(lines), ""]
    return Group(*parts[:-1])


def _by_source(rows: Sequence[Row]) -> RenderableType:
    """Published figures, below a line with their source, the place in it and how it timed."""
    parts: list[RenderableType] = []
    about = ("source", "where", "timed")
    for source, group in groupby(rows, lambda row: tuple(str(row[name]) for name in about)):
        figures_of = [{name: row[name] for name in row if name not in about} for row in group]
        parts += [Text("; ".join(source), "bold"), table_of(figures_of), ""]
    return Group(*parts[:-1])


def _first_flags(ops: Sequence[str], platform: Platform) -> Iterator[str]:
    """For each kind of platform the flags that recipes and guides set and that can act on one of the ops, and
    who sets them: up to FIRST for each op, those that most of them set first."""
    for kind in sorted(KINDS, key=lambda kind: kind != platform.kind) if platform.here else [platform.kind]:
        arch = platform.arch if kind == platform.kind else ""
        set_by: dict[str, dict[str, list[str]]] = {}
        for setter in setters():
            for variable in setter.variables if setter.platform == kind else ():
                flag = catalogue()[variable.name]
                if not flag.without and (not arch or arch in (flag.archs or [arch])):
                    values = set_by.setdefault(flag.name, {})
                    values.setdefault(variable.value or variable.note, []).append(setter.name)
        ordered = sorted(set_by, key=lambda name: -sum(map(len, set_by[name].values())))
        acting = ([name for name in ordered if op in catalogue()[name].ops] for op in ops)
        first = {name for of_op in acting for name in of_op[:FIRST]}
        yield f"{kind} {arch}".strip() + ": what recipes and guides to tuning set, and can act"
        for name in filter(first.__contains__, ordered):
            by = "; ".join(f"{name}={value} by {', '.join(names)}" for value, names in set_by[name].items())
            acts = _acts(name)
            yield from textwrap.wrap(by, WIDTH, subsequent_indent=INDENT)
            yield from _wrapped([f"{catalogue()[name].effect} {acts[0].upper()}{acts[1:]}."])
        guides = [s for s in setters() if s.platform == kind and s.name not in recipes()]
        for guide in guides:
            yield from textwrap.wrap(f"{guide.name}: {guide.document}, {guide.where}", WIDTH)
        yield ""
    yield "`list recipes` has their documents, `list flags --all` every flag that can act, and what values"
    yield "mean; `toggle --flag NAME=A,B` measures one"


def _flags(ops: Sequence[str], platform: Platform) -> list[Flag]:
    """If `ops` are not all ops, only their flags are listed."""
    listed = []
    for flag in catalogue().values():
        acts = platform.kind in flag.platforms and (not flag.archs or platform.arch in flag.archs)
        wanted = set(ops) == set(kernels.OPS) or set(ops) & set(flag.ops)
        if wanted and (platform.here or acts):
            listed.append(flag)
    return listed


def flags_text(flags: Sequence[Flag]) -> str:
    """The flags of each library: a line of facts for each, then its effect and what its values mean."""
    lines = [_flag_line(FLAG_COLUMNS)]
    for library, group in groupby(flags, lambda flag: flag.library):
        lines += ["", library]
        for flag in group:
            # What is too long for its column is a paragraph below the line.
            facts = {"default": flag.default, "ops": _ops(flag)}
            long = {name: text for name, text in facts.items() if len(text) >= FLAG_COLUMNS[name]}
            default, ops = ("..." if name in long else text for name, text in facts.items())
            lines.append(_flag_line((flag.name, default, flag.read, " ".join(flag.platforms), ops)))
            lines += _wrapped(_flag_paragraphs(flag, long))
    read = [f"read {when}: {text}" for when, text in READ.items() if any(f.read == when for f in flags)]
    return "\n".join([*lines, "", *read, "--json has what each entry was read in"])


def _flag_line(cells: Iterable[str]) -> str:
    widths = FLAG_COLUMNS.values()
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _flag_paragraphs(flag: Flag, long: Mapping[str, str]) -> Iterator[str]:
    only = list(flag.archs)
    if flag.launch:
        only.append(f"{flag.launch} launches")
    yield f"{flag.effect} ({', '.join(only)} only)" if only else flag.effect
    yield from (f"{column}: {text}" for column, text in long.items())
    values = "; ".join(f"{value}: {meaning}" for value, meaning in flag.values.items())
    yield "; or ".join(filter(None, [values, flag.takes]))
    if flag.without:
        yield f"no effect on a kernel on one device: {flag.without}"
    for value, by_op in flag.chooses.items():
        rows = ", ".join(f"{op} by {' or '.join(names) or 'no row here'}" for op, names in by_op.items())
        yield f"{value} stands for {rows}"
    if flag.versions:
        yield f"versions: {flag.versions}"
    if flag.unconfirmed:
        yield f"not confirmed: {flag.unconfirmed}"


def _recipe_lines(recipe: Recipe) -> Iterator[str]:
    yield f"{recipe.name}  ({recipe.platform} {recipe.arch})"
    options = f"and, not applied: {' '.join(recipe.options)}" if recipe.options else ""
    yield from _wrapped([f"{recipe.document}: {recipe.where}", recipe.engine, recipe.note, options])
    for variable in recipe.variables:
        setting = variable.name if variable.value is None else f"{variable.name}={variable.value}"
        about = "; ".join(filter(None, [_acts(variable.name), variable.note]))
        yield from textwrap.wrap(
            f"{setting}  # {about}", WIDTH, initial_indent=INDENT, subsequent_indent=f"{INDENT * 2}# "
        )


def _acts(name: str) -> str:
    """What a variable of a recipe acts on, or why no measurement here shows it."""
    flag = catalogue()[name]
    if flag.without:
        return f"cannot act: {flag.without}"
    where = f" on {', '.join(flag.archs)}" if flag.archs else ""
    if flag.chooses:
        return f"an engine chooses between implementations by it{where}: toggle it alone"
    launch = f", in {flag.launch} launches" if flag.launch else ""
    ops = _ops(flag)
    return f"acts on {'every op' if ops == 'all' else ops}{where}{launch}"


def _ops(flag: Flag) -> str:
    return "all" if set(flag.ops) == set(kernels.OPS) else ", ".join(flag.ops) or "none"


def _wrapped(paragraphs: Iterable[str]) -> Iterator[str]:
    """The lines of each paragraph, indented; none for an empty one."""
    for paragraph in paragraphs:
        yield from textwrap.wrap(
            paragraph, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )
