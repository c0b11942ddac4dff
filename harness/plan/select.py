"""Finds the ops, cases, implementations and launch modes that a command names, or raises UsageError."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import kernels
from harness.errors import UsageError
from kernels.engines import choices, engines
from kernels.op import Implementation, Op
from kernels.platform import Platform
from shapes.case import Case, Size, merge, parse
from shapes.names import unknown
from shapes.suites import ragged, suite


def choose_op(name: str) -> Op:
    if name not in kernels.OPS:
        kernels.load_plugins()
        raise UsageError(unknown("op", name, kernels.OPS))
    return kernels.OPS[name]


def choose_cases(
    op: Op, suite_name: str | None, texts: Sequence[str], boundary: str | None, arch: str = ""
) -> list[Case]:
    """The cases of a suite, or of `--case` texts, in the boundary or else in each of the op's. The heaviest
    come first, equal ones in the order of the suite. Sizes that are not given are the architecture's."""
    if boundary is not None and boundary not in op.boundaries:
        raise UsageError(unknown("boundary", boundary, op.boundaries, of=op.name))
    boundaries = [boundary] if boundary else list(op.boundaries)
    defaults = op.defaults(arch)
    try:
        if texts:
            parsed = [sizes for text in texts for sizes in parse(text, op.name)]
            given: Sequence[Case] = [Case(op.name, {**sizes}, weight=1 / len(parsed)) for sizes in parsed]
        else:
            chosen = suite(suite_name or "smoke")
            given = chosen.cases(op.name)
            if not given:
                raise UsageError(chosen.why_no_cases(op.name))
        cases = [
            op.case({**defaults, **case.sizes}, boundary=b, place=case.place, weight=case.weight)
            for case in given
            for b in boundaries
        ]
    except ValueError as error:
        raise UsageError(str(error)) from None
    return sorted(merge(cases), key=lambda case: -case.weight)


KEPT = ("dtype", "kv", "fp8", "scales", "heads", "page", "q")
"""Sizes by which a row decides which kernel it runs, and whether it can run. Ragged cases keep them."""


def kept_sizes(case: Case) -> dict[str, Size]:
    return {name: value for name, value in case.sizes.items() if name in KEPT}


def ragged_cases(op: Op, case: Case, arch: str) -> list[Case]:
    """The small cases of uneven sizes at which each timed implementation is checked too. They have the
    dtypes, heads, pages, query tokens and boundary of the timed case."""
    query_tokens = int(case.sizes.get("q", 1))
    cases = [
        op.case({**op.defaults(arch), **small.sizes, **kept_sizes(case)}, boundary=case.boundary)
        for small in ragged(op.name, query_tokens)
    ]
    return [ragged_case for ragged_case in merge(cases) if ragged_case.key != case.key]


def choose_implementations(op: Op, patterns: str | None) -> list[Implementation]:
    """The implementations that match comma-separated shell patterns, each of which must match one; or all."""
    available = kernels.implementations(op.name)
    if not patterns:
        return available
    selected: dict[str, Implementation] = {}
    for pattern in patterns.split(","):
        matches = {impl.name: impl for impl in available if fnmatch.fnmatchcase(impl.name, pattern.strip())}
        if not matches:
            raise unknown_implementation(op.name, pattern)
        selected |= matches
    return [selected[name] for name in sorted(selected)]


def choose_implementation(op: str, name: str) -> Implementation:
    known = {i.name: i for i in kernels.implementations(op)}
    if name not in known:
        raise unknown_implementation(op, name)
    return known[name]


def unknown_implementation(op: str, name: str) -> UsageError:
    """The error for a name, or a shell pattern, that no implementation has."""
    known = [i.name for i in kernels.implementations(op)]
    return UsageError(unknown("implementation", name.strip(), known, f"list impls --op {op}", op))


def choose_one_case(op: Op, text: str, boundary: str | None, arch: str, purpose: str) -> Case:
    """The one case of a `--case` text, by default at the op's first boundary. purpose: for the error"""
    cases = choose_cases(op, None, [text], boundary or op.boundaries[0], arch)
    if len(cases) > 1:
        raise UsageError(f"{text!r} names {len(cases)} cases; a {purpose} is of one")
    return cases[0]


def choose_baseline(
    op: Op,
    platform: Platform,
    option: str | None,
    selected: Sequence[Implementation],
    cases: Sequence[Case] = (),
    variables: Mapping[str, str | None] = {},
) -> tuple[str, list[Implementation]]:
    """The baseline, an implementation or an engine, by default the op's best torch implementation; and the
    implementations that `selected` lacks for it: for an engine what it runs in the cases under variables."""
    known = {impl.name: impl for impl in kernels.implementations(op.name)}
    baseline = option or op.baseline[platform.kind]
    if baseline in engines():
        rows = {_default_row(baseline, case, platform, variables) for case in cases}
    elif baseline in known:
        rows = {baseline}
    else:
        allowed = [*engines(), *known]
        raise UsageError(unknown("baseline", baseline, allowed, f"list impls --op {op.name}", op.name))
    missing = rows - {impl.name for impl in selected}
    return baseline, [known[row] for row in sorted(missing)]


def _default_row(engine: str, case: Case, platform: Platform, variables: Mapping[str, str | None]) -> str:
    """The row that an engine runs by default in a case. Raises UsageError where none can run here."""
    why = f"what it runs on {platform.arch} is not recorded"
    if choice := choices(case.op, platform.arch, case.sizes, variables).get(engine):
        why = choice.why
    if choice and choice.row:
        support = choose_implementation(case.op, choice.row).supports(case, platform)
        if support.ok:
            return choice.row
        why = f"{choice.row}: {support.reason}"
    raise UsageError(f"--baseline {engine} has no row at {case.key}: {why}")


def launches(platform: Platform, option: str | None) -> list[str]:
    """The launch modes that `--launch` names; by default `graph` on a GPU. A CPU has no graphs."""
    if platform.kind == "cpu":
        if option in ("graph", "both"):
            raise UsageError(f"--launch {option} needs a GPU; this is a CPU, whose calls are eager")
        return ["eager"]
    modes = {"graph": ["graph"], "eager": ["eager"], "both": ["graph", "eager"]}
    return modes[option or "graph"]
