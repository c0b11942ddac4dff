"""What will be measured: which cases within the budget, which contenders."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kernels
from harness.errors import UsageError
from kernels.op import Implementation, Op
from kernels.platform import Platform
from shapes.case import Case, merge, parse, text_of
from shapes.suites import suite, suites

PLAIN = "plain"


def choose_op(name: str) -> Op:
    if name not in kernels.OPS:
        kernels.load_plugins()
        raise UsageError(f"unknown op {name!r}; ops: {', '.join(kernels.OPS)}")
    return kernels.OPS[name]


def choose_cases(
    op: Op, suite_name: str | None, texts: Sequence[str], boundary: str | None, arch: str = ""
) -> list[Case]:
    """The cases of a suite or of `--case` texts in each boundary, canonical, heaviest first, among equals in
    suite order; sizes that they leave open are the architecture's."""
    if boundary is not None and boundary not in op.boundaries:
        raise UsageError(
            f"unknown boundary {boundary!r} for {op.name}; boundaries: {', '.join(op.boundaries)}"
        )
    boundaries = [boundary] if boundary else list(op.boundaries)
    try:
        if texts:
            sizes = [{**op.defaults(arch), **s} for text in texts for s in parse(text)]
            found = [op.case(s, boundary=b, weight=1 / len(sizes)) for s in sizes for b in boundaries]
        else:
            found = [
                op.case({**op.defaults(arch), **c.sizes}, boundary=b, place=c.place, weight=c.weight)
                for c in _suite(suite_name or "smoke").cases(op.name)
                for b in boundaries
            ]
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not found:
        raise UsageError(f"suite {suite_name!r} has no cases for {op.name}")
    return sorted(merge(found), key=lambda case: -case.weight)


def _suite(name: str) -> Any:
    if name not in suites():
        raise UsageError(f"unknown suite {name!r}; suites: {', '.join(suites())}")
    return suite(name)


def choose_implementations(op: Op, patterns: str | None) -> list[Implementation]:
    """Implementations that match any of the comma-separated shell patterns; each must match one."""
    available = kernels.implementations(op.name)
    if not patterns:
        return available
    chosen: dict[str, Implementation] = {}
    for pattern in patterns.split(","):
        matches = [i for i in available if fnmatch.fnmatchcase(i.name, pattern.strip())]
        if not matches:
            names = ", ".join(i.name for i in available)
            raise UsageError(f"no implementation of {op.name} matches {pattern!r}; there are: {names}")
        chosen.update({i.name: i for i in matches})
    return [chosen[name] for name in sorted(chosen)]


def choose_baseline(op: Op, platform: Platform, named: str | None, chosen: list[Implementation]) -> str:
    """The named baseline, or the op's best torch implementation here; it joins the chosen ones."""
    known = {i.name: i for i in kernels.implementations(op.name)}
    baseline = named or op.baseline[platform.kind]
    if baseline not in known:
        raise UsageError(f"unknown baseline {baseline!r}; implementations: {', '.join(known)}")
    if baseline not in {i.name for i in chosen}:
        chosen.append(known[baseline])
    return baseline


@dataclass(frozen=True)
class Arm:
    """What cells run under: a set of environment variables, none in the plain arm, or a source tree.

    variables: None takes one away
    again:     the first arm a second time, in workers of its own: what differs between the two is noise
    tree:      whose kernels/ it runs; None: this one
    revision:  what the tree is called
    """

    variables: dict[str, str | None] = field(default_factory=dict)
    again: bool = False
    tree: str | None = None
    revision: str = ""

    @property
    def name(self) -> str:
        words = [self.revision] if self.revision else []
        words += [f"{k} unset" if v is None else f"{k}={v}" for k, v in self.variables.items()]
        return (", ".join(words) or PLAIN) + " (again)" * self.again


@dataclass(frozen=True)
class Entries:
    """Under which configurations an implementation enters a case; None: the one that it chooses itself.

    configs: the anchor's first
    found:   how they were found, for the record
    """

    configs: Sequence[dict[str, Any] | None] = (None,)
    found: Mapping[str, Any] = field(default_factory=dict)


def as_it_chooses(implementation: Implementation, case: Case) -> Entries:
    return Entries()


def contender_name(
    impl: str, arm: str, launch: str, platform: str, config: Mapping[str, Any] | None = None
) -> str:
    """What verdicts call a cell: the implementation, with what is not the rule: an arm that sets something,
    an eager launch on a GPU, a configuration that it was told to use."""
    special = [f"@ {arm}"] if arm != PLAIN else []
    special += ["eager"] if launch == "eager" and platform != "cpu" else []
    special += [text_of(config)] if config else []
    return " ".join([impl, *special])


def parse_arm(settings: Iterable[str]) -> Arm:
    variables = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"cannot read --set {text!r}; write NAME=VALUE")
        variables[name] = value
    parse_threads(variables.get("OMP_NUM_THREADS"))
    return Arm(variables)


def launches(platform: Platform, wanted: str | None) -> list[str]:
    """Launch modes to measure; a CPU has no graphs."""
    if platform.kind == "cpu":
        if wanted in ("graph", "both"):
            raise UsageError(f"--launch {wanted} needs a GPU; this is a CPU, whose calls are eager")
        return ["eager"]
    return {"graph": ["graph"], "eager": ["eager"], "both": ["graph", "eager"]}[wanted or "graph"]


def allowance(remaining_s: float, queue: Sequence[Case], least_s: float) -> tuple[float, int]:
    """Seconds of the remaining budget for the first case of the queue, and how many cases it reaches:
    as many as get `least_s` each, one at any rate, and among those by weight."""
    reached = queue[: max(1, int(remaining_s // least_s))]
    share = remaining_s * queue[0].weight / (sum(case.weight for case in reached) or 1.0)
    return max(1e-3, min(remaining_s, max(least_s, share))), len(reached)


def parse_threads(text: str | None) -> int | None:
    """OMP_NUM_THREADS as a number; None where it is not set."""
    if not text:
        return None
    if not (text.isdecimal() and int(text)):
        raise UsageError(f"cannot read OMP_NUM_THREADS={text!r}; write a number of threads")
    return int(text)


def parse_shard(text: str | None) -> tuple[int, int]:
    """`2/4`, the second of four parts; all of one where nothing is said."""
    match = re.fullmatch(r"(\d+)/(\d+)", text if text is not None else "1/1")
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text}: write 1/4 for the first of four parts")
    return int(match[1]), int(match[2])


def parse_seconds(text: str, option: str) -> float:
    """`60`, `60s`, `5m`, `1h` -> seconds; `option` is named in the error."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"cannot read {option} {text!r}; write for example 60s, 5m or 1h")
    return seconds
