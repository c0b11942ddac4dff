"""Lists of what there is: ops, implementations, cases, suites, linears, published figures, flags, recipes.

Found without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from tabulate import tabulate

import kernels
from harness.catalogue import flags, recipes
from harness.catalogue.published import figures
from harness.errors import UsageError
from harness.report.catalogue_text import flags_text, recipes_text
from kernels.platform import Platform
from shapes.attention import Parallel
from shapes.case import text_of
from shapes.cases import R1
from shapes.linears import linears
from shapes.models import model
from shapes.suites import suite, suites

ALL = "all"

Row = Mapping[str, object]


@dataclass(frozen=True)
class Listing:
    """rows: objects of JSON; text: the same for people."""

    rows: Sequence[Row]
    text: str


def listing(what: str, ops: Sequence[str], platform: Platform, suite_name: str | None) -> Listing:
    """what: a key of LISTS or `flags`, `recipes`; of a platform that is not this machine, only its flags and
    recipes. Raises UsageError for an unknown suite."""
    if what == "flags":
        return _flags(ops, platform)
    if what == "recipes":
        return _recipes(platform)
    rows = LISTS[what](ops, platform, suite_name)
    return Listing(rows, _table(rows))


def _table(rows: Sequence[Row]) -> str:
    return tabulate([list(map(_cell, row.values())) for row in rows], list(rows[0]) if rows else [])


def _cell(value: object) -> object:
    return ("yes" if value else "no") if isinstance(value, bool) else value


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
    return Listing([asdict(flag) | {"ops": flag.ops} for flag in listed], flags_text(listed))


def _acts_on(flag: flags.Flag, platform: Platform) -> bool:
    return platform.kind in flag.platforms and (not flag.archs or platform.arch in flag.archs)


def _recipes(platform: Platform) -> Listing:
    listed = [r for r in recipes.recipes().values() if platform.here or r.platform == platform.kind]
    return Listing([asdict(recipe) for recipe in listed], recipes_text(listed))
