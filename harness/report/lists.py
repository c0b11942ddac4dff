"""Lists of what there is: ops, implementations, cases, suites, models, linears, published figures, flags,
recipes.

They are made without importing torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

import kernels
from harness.catalogue.architectures import evidence
from harness.catalogue.flags import READ, Flag, catalogue
from harness.catalogue.published import figures
from harness.catalogue.recipes import Recipe, recipes, setters
from harness.errors import UsageError
from harness.paths import command
from harness.plan.select import choose_cases
from harness.report.fitting_table import table_of
from harness.report.terminal import line_width
from harness.report.text import grouped
from kernels.platform import KINDS, Platform
from shapes.attention import Parallel
from shapes.case import parse, text_of
from shapes.cases import R1
from shapes.linears import linears
from shapes.models import model, models
from shapes.suites import suite, suites

ALL = "all"
INDENT = "    "

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
        return rows, lambda: _titled(_by_suite(rows))
    if what == "flags":
        flags = _flags(ops, *(("", "") if platform.here else (platform.kind, platform.arch)))
        rows = [asdict(flag) | {"ops": flag.ops} for flag in flags]
        last = _all_flags(flags) if every else _more_of_flags(ops, platform)
        return rows, lambda: "\n".join([*_first_flags(ops, platform), *last])
    if what == "recipes":
        listed = [r for r in recipes().values() if platform.here or r.platform == platform.kind]
        text = "\n\n".join("\n".join(_recipe_lines(recipe)) for recipe in listed)
        return [asdict(recipe) for recipe in listed], lambda: text
    if what == "models":
        named = [model(name) for name in models()]
        rows = [
            {"model": m.name, "source": m.source, "MTP layers, left out": m.num_nextn_predict_layers,
             "not modelled": m.not_modelled}
            for m in named
        ]  # fmt: skip
        lines = []
        for m in named:
            mtp = f"MTP layers, left out: {m.num_nextn_predict_layers}" if m.num_nextn_predict_layers else ""
            lines += [m.name, *_wrapped([m.source, *m.not_modelled, mtp])]
        return rows, lambda: "\n".join(lines)
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
    return rows, lambda: _titled(_by_source(rows)) if what == "published" else table_of(rows)


def of_case(ops: Sequence[str], text: str, platform: Platform) -> Listing:
    """The implementations of the op that has these sizes, with whether they take a case in any boundary. The
    reason of the others is the one that `run` gives for the widest boundary. Raises UsageError unless the
    text is one case, of one op."""
    try:
        given = parse(text, ops[0] if len(ops) == 1 else "")
    except ValueError as error:
        raise UsageError(str(error)) from None
    having = [op for op in ops if given[0].keys() <= {field.name for field in fields(kernels.OPS[op].Sizes)}]
    if len(ops) > 1 and len(having) != 1:
        raise UsageError(f"say whose case {text!r} is: --op {' or --op '.join(having or ops)}")
    op = having[0] if having else ops[0]
    first = next(iter(suite("r1-tp8").cases(op)), None)
    whole = [text_of({**first.sizes, **sizes}) for sizes in given] if first else [text]
    cases = choose_cases(kernels.OPS[op], None, whole, None, platform.arch)
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
    try:
        chosen = list(suites().values()) if suite_name == ALL else [suite(suite_name)]
        by_op = [(each.name, op, each.cases(op)) for each in chosen for op in ops]
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not any(cases for *_, cases in by_op):
        raise UsageError(chosen[0].why_no_cases(ops[0]))
    return [
        {
            "suite": name,
            "op": op,
            "case": kernels.OPS[op].case({**kernels.OPS[op].defaults(platform.arch), **c.sizes}).text,
            "weight": round(c.weight, 4),
            "place": c.place,
        }
        for name, op, cases in by_op
        for c in cases
    ]


def _titled(groups: Iterable[tuple[str, Sequence[Row]]]) -> RenderableType:
    """A table for each group, below its title."""
    parts = [part for title, rows in groups for part in (Text(title, "bold"), table_of(rows), "")]
    return Group(*parts[:-1])


def _by_suite(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The cases of each suite and op; the title has the sizes that all of them have."""
    for (suite_name, op), group in groupby(rows, lambda row: (row["suite"], row["op"])):
        cases = list(group)
        sizes = [str(row["case"]).split() for row in cases]
        shared = [size for size in sizes[0] if len(cases) > 1 and all(size in case for case in sizes)]
        places = {str(row["place"]) for row in cases}
        about = [f"{suite_name} {op}"]
        about += [place for place in places if len(places) == 1 and place != suite_name]
        if shared:
            about.append(f"all with {' '.join(shared)}")
        yield (
            "; ".join(about),
            [
                {
                    "case": " ".join(size for size in case if size not in shared),
                    "weight": f"{100 * float(str(row['weight'])):.1f} %",
                    "place": "" if len(places) == 1 else row["place"],
                }
                for row, case in zip(cases, sizes, strict=True)
            ],
        )


def _by_source(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Published figures; the title has their source, the place in it and how it timed."""
    about = ("source", "where", "timed")
    for title, group in groupby(rows, lambda row: "; ".join(str(row[name]) for name in about)):
        yield title, [{name: row[name] for name in row if name not in about} for row in group]


def _first_flags(ops: Sequence[str], platform: Platform) -> Iterator[str]:
    """For each kind of platform the flags that can act on one of the ops: those by which an engine chooses
    between implementations, then those that recipes and guides set, with the names of these."""
    for kind in sorted(KINDS, key=lambda kind: kind != platform.kind) if platform.here else [platform.kind]:
        arch = platform.arch if kind == platform.kind else ""
        of_kind = [setter for setter in setters() if setter.platform == kind]
        set_by = grouped(((v, s.name) for s in of_kind for v in s.variables), lambda pair: pair[0].name)
        can_act = [flag for flag in _flags(ops, kind, arch) if not flag.without]
        listed = [f for f in can_act if f.name in set_by or (_chooses(f, ops) and not f.versions)]
        listed.sort(key=lambda f: (not f.chooses, bool(f.versions), -len(set_by.get(f.name, ()))))
        yield f"{kind} {arch}".strip() + ": engines' switches, then what recipes and guides set"
        for flag in listed:
            heads = [f"{flag.name}: {flag.library}'s switch"] if flag.chooses else []
            values = grouped(set_by.get(flag.name, ()), lambda pair: pair[0].value or pair[0].note)
            heads += [f"{flag.name}={v} by {', '.join(name for _, name in of)}" for v, of in values.items()]
            yield from [*_wrapped(["; ".join(heads)], ""), *_wrapped(_about(flag))]
        guides = [setter for setter in of_kind if setter.name not in recipes()]
        yield from [*_wrapped((f"{g.name}: {g.document}, {g.where}" for g in guides), ""), ""]


def _chooses(flag: Flag, ops: Sequence[str]) -> bool:
    """Whether an engine chooses by it between rows of an op."""
    return any(sum(bool(rows.get(op)) for rows in flag.chooses.values()) > 1 for op in ops)


def _more_of_flags(ops: Sequence[str], platform: Platform) -> Iterator[str]:
    where = [] if platform.here else ["--arch", platform.arch]
    where += ["--op", *ops] if len(ops) == 1 else []
    yield "every flag that can act, and what its values mean:"
    yield f"  {command('list', 'flags', '--all', *where)}"
    yield "`list recipes` has the documents; `toggle --flag NAME=A,B` measures a flag"


def _flags(ops: Sequence[str], kind: str, arch: str) -> list[Flag]:
    """The flags of the ops that can act there; an empty kind or arch stands for all."""
    return [
        flag
        for flag in catalogue().values()
        if (not kind or kind in flag.platforms) and (not arch or arch in (flag.archs or [arch]))
        if set(ops) == set(kernels.OPS) or set(ops) & set(flag.ops)
    ]


def _all_flags(flags: Sequence[Flag]) -> Iterator[str]:
    """The flags of each library: its effect, when it is read and what its values mean."""
    for library, group in groupby(flags, lambda flag: flag.library):
        yield library
        for flag in group:
            yield from [flag.name, *_wrapped([*_about(flag), *_details(flag)])]
        yield ""
    yield "--json has what each entry was read in"


def _about(flag: Flag) -> Iterator[str]:
    """The effect of a flag, what it acts on, and the versions that read it."""
    acts = _acts(flag.name)
    yield f"{flag.effect} {acts[0].upper()}{acts[1:]}."
    if flag.versions:
        yield f"versions: {flag.versions}"


def _details(flag: Flag) -> Iterator[str]:
    yield f"default: {flag.default}; read {READ[flag.read]}; platforms: {', '.join(flag.platforms)}"
    values = "; ".join(f"{value}: {meaning}" for value, meaning in flag.values.items())
    yield "; or ".join(filter(None, [values, flag.takes]))
    for value, by_op in flag.chooses.items():
        rows = ", ".join(f"{op} by {' or '.join(names) or 'no row here'}" for op, names in by_op.items())
        yield f"{value} stands for {rows}"
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
            f"{setting}  # {about}", line_width(), initial_indent=INDENT, subsequent_indent=f"{INDENT * 2}# "
        )


def _acts(name: str) -> str:
    """What a flag acts on, or why no measurement here shows it."""
    flag = catalogue()[name]
    if flag.without:
        return f"cannot act: {flag.without}"
    where = f" on {', '.join(flag.archs)}" if flag.archs else ""
    if flag.chooses:
        return f"an engine chooses between implementations by it{where}: toggle it alone"
    launch = f", in {flag.launch} launches" if flag.launch else ""
    rows = dict.fromkeys(row for of_op in flag.touches.values() for row in of_op)
    widest = [row for row in rows if not any(row != other and fnmatchcase(row, other) for other in rows)]
    of_rows = "" if "*" in rows else f", on rows {', '.join(widest)}"
    every = set(flag.ops) == set(kernels.OPS)
    return f"acts on {'every op' if every else ', '.join(flag.ops) or 'no op'}{where}{launch}{of_rows}"


def _wrapped(paragraphs: Iterable[str], indent: str = INDENT) -> Iterator[str]:
    """The lines of each paragraph; none for an empty one. indent: of the first line of each"""
    for paragraph in paragraphs:
        yield from textwrap.wrap(
            paragraph, line_width(), initial_indent=indent, subsequent_indent=INDENT, break_on_hyphens=False
        )
