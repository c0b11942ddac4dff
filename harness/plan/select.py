"""The ops, cases, implementations and launch modes that a command names. Each function raises UsageError
for what it does not know."""

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
    """The cases of a suite or of `--case` texts in each boundary, the heaviest first, among equals in the
    order of the suite. Sizes that they leave open are the architecture's defaults."""
    if boundary is not None and boundary not in op.boundaries:
        raise UsageError(unknown("boundary", boundary, op.boundaries, of=op.name))
    boundaries = [boundary] if boundary else list(op.boundaries)
    try:
        if texts:
            sizes = [{**op.defaults(arch), **s} for text in texts for s in parse(text, op.name)]
            cases = [op.case(s, boundary=b, weight=1 / len(sizes)) for s in sizes for b in boundaries]
        else:
            chosen = suite(suite_name or "smoke")
            if not chosen.cases(op.name):
                raise UsageError(chosen.why_no_cases(op.name))
            cases = [
                op.case({**op.defaults(arch), **c.sizes}, boundary=b, place=c.place, weight=c.weight)
                for c in chosen.cases(op.name)
                for b in boundaries
            ]
    except ValueError as error:
        raise UsageError(str(error)) from None
    return sorted(merge(cases), key=lambda case: -case.weight)


KEPT = ("dtype", "kv", "fp8", "scales", "heads", "page", "q")
"""Sizes by which a row decides what it runs, and whether it can: ragged cases keep them."""


def kept_sizes(case: Case) -> dict[str, Size]:
    return {name: value for name, value in case.sizes.items() if name in KEPT}


def ragged_cases(op: Op, case: Case, arch: str) -> list[Case]:
    """The small cases of uneven sizes at which each timed implementation is checked too. They have the
    dtypes, heads, pages, query tokens and boundary of the timed case."""
    made = [
        op.case({**op.defaults(arch), **each.sizes, **kept_sizes(case)}, boundary=case.boundary)
        for each in ragged(op.name, int(case.sizes.get("q", 1)))
    ]
    return [each for each in merge(made) if each.key != case.key]


def choose_implementations(op: Op, patterns: str | None) -> list[Implementation]:
    """Implementations that match any of the comma-separated shell patterns; each must match one."""
    available = kernels.implementations(op.name)
    if not patterns:
        return available
    selected: dict[str, Implementation] = {}
    for pattern in patterns.split(","):
        matches = [i for i in available if fnmatch.fnmatchcase(i.name, pattern.strip())]
        if not matches:
            raise unknown_implementation(op.name, pattern)
        selected.update({i.name: i for i in matches})
    return [selected[name] for name in sorted(selected)]


def choose_implementation(op: str, name: str) -> Implementation:
    known = {i.name: i for i in kernels.implementations(op)}
    if name not in known:
        raise unknown_implementation(op, name)
    return known[name]


def unknown_implementation(op: str, name: str) -> UsageError:
    """name: a name or a shell pattern"""
    known = [i.name for i in kernels.implementations(op)]
    return UsageError(unknown("implementation", name.strip(), known, f"list impls --op {op}", op))


def choose_one_case(op: Op, text: str, boundary: str | None, arch: str, purpose: str) -> Case:
    """The case of a `--case` text that names one; the boundary is the op's first by default. purpose: what
    it is for, in words"""
    cases = choose_cases(op, None, [text], boundary or op.boundaries[0], arch)
    if len(cases) > 1:
        raise UsageError(f"{text!r} names {len(cases)} cases; a {purpose} is of one")
    return cases[0]


def choose_baseline(
    op: Op,
    platform: Platform,
    named: str | None,
    selected: list[Implementation],
    cases: Sequence[Case] = (),
    given: Mapping[str, str | None] = {},
) -> str:
    """The named baseline, or the op's best torch implementation on this platform. An engine stands for what
    it runs by default in each case. The rows are added to `selected`. given: variables of the run"""
    known = {i.name: i for i in kernels.implementations(op.name)}
    baseline = named or op.baseline[platform.kind]
    if baseline not in known and baseline not in engines():
        known_too = [*engines(), *known]
        raise UsageError(unknown("baseline", baseline, known_too, f"list impls --op {op.name}", op.name))
    rows = [baseline]
    if baseline in engines():
        rows = [_default_row(baseline, case, platform, given) for case in cases]
    missing = set(rows) - {i.name for i in selected}
    selected += [known[row] for row in sorted(missing)]
    return baseline


def _default_row(engine: str, case: Case, platform: Platform, given: Mapping[str, str | None]) -> str:
    """What an engine runs by default in a case. Raises UsageError where that is no row that can run here."""
    choice = choices(case.op, platform.arch, case.sizes, given).get(engine)
    why = choice.why if choice else f"what it runs on {platform.arch} is not recorded"
    if choice and choice.row:
        support = choose_implementation(case.op, choice.row).supports(case, platform)
        if support.ok:
            return choice.row
        why = f"{choice.row}: {support.reason}"
    raise UsageError(f"--baseline {engine} has no row at {case.key}: {why}")


def launches(platform: Platform, wanted: str | None) -> list[str]:
    """The launch modes to measure; a CPU has no graphs."""
    if platform.kind == "cpu":
        if wanted in ("graph", "both"):
            raise UsageError(f"--launch {wanted} needs a GPU; this is a CPU, whose calls are eager")
        return ["eager"]
    return {"graph": ["graph"], "eager": ["eager"], "both": ["graph", "eager"]}[wanted or "graph"]
