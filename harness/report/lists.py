"""Lists of what there is: ops, implementations, cases, suites, linears, published figures, flags, recipes.

Found without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING

import kernels
from harness.catalogue import flags, recipes
from harness.catalogue.evidence import evidence
from harness.catalogue.published import figures
from harness.errors import UsageError
from harness.plan.select import choose_cases
from harness.report.catalogue_text import flags_text, recipes_text
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
LONG = 24  # characters of a cell that may be broken into lines

Row = Mapping[str, object]


@dataclass(frozen=True)
class Listing:
    """rows: objects of JSON; shown: makes the same for people."""

    rows: Sequence[Row]
    shown: Callable[[], RenderableType]


def listing(what: str, ops: Sequence[str], platform: Platform, suite_name: str | None) -> Listing:
    """what: a key of LISTS or `flags`, `recipes`; of a platform that is not this machine, only its flags and
    recipes. Raises UsageError for an unknown suite."""
    if what == "flags":
        return _flags(ops, platform)
    if what == "recipes":
        return _recipes(platform)
    rows = LISTS[what](ops, platform, suite_name)
    if what == "impls":
        return Listing(rows, lambda: _by_reason(rows))
    return Listing(rows, lambda: _by_suite(rows) if what == "cases" else _table(rows))


def of_case(op: str, text: str, platform: Platform) -> Listing:
    """The implementations of an op. Those that take the case in any boundary stand first; for each of the
    others the reason is that of `run` in the widest boundary. Raises UsageError for what is not one case."""
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
    """Implementations: first those that do what the verb says, then the others by what keeps them away. Those
    of one op stand with what each requires."""
    from rich.console import Group
    from rich.text import Text

    one_op = len({row["op"] for row in rows}) == 1
    boundaries = {str(row["boundary"]) for row in rows}
    named = ["implementation", "boundary"] if len(boundaries) > 1 else ["implementation"]
    here = [
        ({} if one_op else {"op": row["op"]})
        | {name: row[name] for name in named}
        | {
            "note": str(row["why not"]).partition(" (")[0],
            "version": f"{row['provider']} {row['version']}".strip(),
        }
        for row in rows
        if row["runs"]
    ]
    others: dict[str, list[Row]] = {}
    for row in rows:
        if not row["runs"]:
            # Which machine this is stands above already.
            others.setdefault(str(row["why not"]).partition("; this is ")[0], []).append(row)
    everywhere = "" if len(boundaries) > 1 else f"; all compute {boundaries.pop()}"
    can = Text(f"\n{len(here)} of {len(rows)} {verb}{everywhere}", "bold green")
    parts: list[RenderableType] = [can, *([_table(here)] if here else [])]
    # What the case alone keeps away stands before what the machine does.
    for reason, group in sorted(others.items(), key=lambda of: (not of[1][0].get("near"), -len(of[1]))):
        parts += ["", Text(f"{len(group)} cannot: {reason}", "bold")]
        parts += [_table(_requirements(group, named) if one_op else list(_names(group)))]
    return Group(*parts, *([] if one_op else ["", "with --op OP or --json: what each requires"]))


def _requirements(rows: Sequence[Row], named: Sequence[str]) -> list[Row]:
    return [{name: row[name] for name in (*named, "requires")} for row in rows]


def _names(rows: Sequence[Row]) -> Iterator[Row]:
    """A line for each op."""
    for op, group in groupby(rows, lambda row: row["op"]):
        yield {"op": op, "implementations": ", ".join(str(row["implementation"]) for row in group)}


def _by_suite(rows: Sequence[Row]) -> RenderableType:
    """Cases of each suite and op, the sizes that all of them have said once."""
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
    """Every linear of DeepSeek-R1 on one rank; those of kind fp8 block-scale are block_scale_gemm's."""
    return [
        {"parallel": parallel.text, **asdict(linear)}
        for parallel in (Parallel(tp=8), Parallel(tp=4), Parallel(dp=8, ep=8))
        for linear in linears(model(R1), parallel)
    ]


def _published(ops: Sequence[str], platform: Platform, suite_name: str | None) -> list[Row]:
    """Figures of others, of all devices."""
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
"""Those that read well as a table of their rows."""


def _flags(ops: Sequence[str], platform: Platform) -> Listing:
    """All there is of each flag; of an op, only its own."""
    listed = [
        flag
        for flag in flags.catalogue().values()
        if (platform.here or _acts_on(flag, platform))
        and (set(ops) == set(kernels.OPS) or set(ops) & set(flag.ops))
    ]
    return Listing(
        [asdict(flag) | {"ops": flag.ops} for flag in listed], lambda: _unbroken(flags_text(listed))
    )


def _unbroken(text: str) -> Text:
    """Of lines that are as long as they should be."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ignore")


def _acts_on(flag: flags.Flag, platform: Platform) -> bool:
    return platform.kind in flag.platforms and (not flag.archs or platform.arch in flag.archs)


def _recipes(platform: Platform) -> Listing:
    listed = [r for r in recipes.recipes().values() if platform.here or r.platform == platform.kind]
    return Listing([asdict(recipe) for recipe in listed], lambda: _unbroken(recipes_text(listed)))
