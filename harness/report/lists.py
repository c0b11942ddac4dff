"""`python -m harness list`: what there is, found without importing torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

import kernels
from harness.catalogue.published import figures
from harness.errors import UsageError
from harness.files import write
from harness.plan.select import choose_op
from harness.report import catalogue_text
from kernels.platform import Platform, detect, named
from shapes.attention import Parallel
from shapes.case import text_of
from shapes.cases import R1
from shapes.linears import linears
from shapes.models import model
from shapes.suites import suite, suites

ALL = "all"


def show(
    what: str, op: str | None, suite: str | None, platform: str | None, arch: str, json_to: str | None
) -> None:
    """Prints a table, or writes a list of objects with the same columns as JSON."""
    if arch and not platform:
        raise UsageError("--arch needs --platform")
    here = named(platform, arch) if platform else detect()
    ops = [choose_op(op).name] if op else list(kernels.OPS)
    rows = KINDS[what](ops, here, suite)
    if json_to:
        text = json.dumps(rows, indent=1) + "\n"
        write(json_to, text)
        return
    if what == "impls" or not here.here:
        print(f"{here.kind} {here.arch} {here.name}".strip() + ("" if here.here else " (not this machine)"))
    print(TEXTS.get(what, _table)(rows))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    return tabulate([list(map(_cell, row.values())) for row in rows], list(rows[0]) if rows else [])


def _cell(value: Any) -> Any:
    return ("yes" if value else "no") if isinstance(value, bool) else value


def _ops(ops: list[str], here: Platform, suite_name: str | None) -> list[dict[str, Any]]:
    return [
        {
            "op": op,
            "sizes": ", ".join(kernels.OPS[op].Sizes.__dataclass_fields__),
            "boundaries": ", ".join(kernels.OPS[op].boundaries),
            "implementations": len(kernels.implementations(op)),
            "baseline here": kernels.OPS[op].baseline[here.kind],
        }
        for op in ops
    ]


def _impls(ops: list[str], here: Platform, suite_name: str | None) -> list[dict[str, Any]]:
    rows = []
    for op in ops:
        for impl in kernels.implementations(op):
            support = impl.available(here)
            how = "checked, not timed (interpreted)" if support.ok and impl.interpreted(here) else ""
            rows.append(
                {
                    "op": op,
                    "implementation": impl.name,
                    "provider": impl.provider,
                    "version": impl.version if here.here else "",
                    "boundary": ", ".join(impl.boundaries),
                    "runs": support.ok,
                    "why not": support.reason or how,
                    "requires": impl.requires,
                }
            )
    return rows


def _cases(ops: list[str], here: Platform, suite_name: str | None) -> list[dict[str, Any]]:
    name = suite_name or "smoke"
    if name not in (*suites(), ALL):
        raise UsageError(f"unknown suite {name!r}; suites: {', '.join(suites())}, or {ALL}")
    return [
        {
            "suite": name,
            "op": op,
            "case": kernels.OPS[op].case({**kernels.OPS[op].defaults(here.arch), **c.sizes}).text,
            "weight": round(c.weight, 4),
            "place": c.place,
        }
        for name in (suites() if name == ALL else [name])
        for op in ops
        for c in suite(name).cases(op)
    ]


def _suites(ops: list[str], here: Platform, suite_name: str | None) -> list[dict[str, Any]]:
    return [{"suite": s.name, "description": s.description} for s in suites().values()]


def _linears(ops: list[str], here: Platform, suite_name: str | None) -> list[dict[str, Any]]:
    """Every linear of DeepSeek-R1 on one rank; those of kind fp8 block-scale are block_scale_gemm's."""
    return [
        {"parallel": parallel.text, **asdict(linear)}
        for parallel in (Parallel(tp=8), Parallel(tp=4), Parallel(dp=8, ep=8))
        for linear in linears(model(R1), parallel)
    ]


def _published(ops: list[str], here: Platform, suite_name: str | None) -> list[dict[str, Any]]:
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


KINDS = {
    "ops": _ops,
    "impls": _impls,
    "cases": _cases,
    "suites": _suites,
    "linears": _linears,
    "published": _published,
    "flags": catalogue_text.flag_rows,
    "recipes": catalogue_text.recipe_rows,
}
TEXTS = {"flags": catalogue_text.flags_text, "recipes": catalogue_text.recipes_text}
"""What does not read well as a table of its rows."""
