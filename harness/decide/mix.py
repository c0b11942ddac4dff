"""How often a server calls each measured case: the mix by which cases are weighed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import kernels
from harness.decide.measured import CaseKey, Measured, sizes_of
from harness.engine import EngineRequest, shares
from harness.errors import UsageError
from harness.serving.link.kernel_times import AXES
from shapes.case import Size, text_of
from shapes.cases import R1
from shapes.deployment import Call, served
from shapes.lengths import parse_span
from shapes.scheduler import Workload, simulate
from shapes.suites import cases_file

BEYOND = 2.0
"""A factor beyond the measured sizes, up to which the nearest case stands for a call."""
FIXED = {op: (*fixed, *(("routing",) if op == "fused_moe" else ())) for op, (fixed, _) in AXES.items()}
"""By op: the sizes in which a call and a case have to agree."""


@dataclass
class Weighed:
    """A measured case with its calls in the mean step of the server."""

    key: CaseKey
    sizes: Mapping[str, Size]
    decode: float = 0.0
    """Calls in steps that only decode."""
    prefill: float = 0.0
    """Calls in steps with prompt tokens."""

    @property
    def op(self) -> str:
        return self.key[0]

    @property
    def calls(self) -> float:
        return self.decode + self.prefill


@dataclass(frozen=True)
class Mix:
    """The cases of a decision."""

    text: str
    """What the weights are, for people."""
    cases: Sequence[Weighed]
    counts_calls: bool
    """Whether weights are calls of a step, so that times of several ops add up."""
    workload: Workload | None = None
    decode_share: float = 0.0
    """The share of steps that decode; 0 where it is not known."""
    prompts: float = 0.0
    """Prompts that are prefilled in a mean step; 0 where it is not known."""
    uncovered: Sequence[Weighed] = ()
    """Calls that no measured case stands for."""
    covered: float = 1.0
    """The share of the four ops' time in a step that has measured cases; times are the least that the
    device's data sheet allows."""
    words: Sequence[str] = ()
    """The options by which `run` measures the calls' cases: a suite or a file."""


def mix_of(measured: Measured, request: EngineRequest | None) -> Mix:
    """The mix of a deployment's workload or of its file of cases; None: as the runs' suites weigh cases.
    Raises UsageError."""
    if request is None:
        return _recorded(measured)
    if request.cases:
        try:
            file = cases_file(request.cases)
        except ValueError as error:
            raise UsageError(str(error)) from None
        calls = [
            Call(each.op, {**each.sizes}, "", each.weight, each.place, prefill="prefill" in each.place)
            for each in file.cases
        ]
        return _weighed(measured, request, calls, f"the calls of {request.cases}")
    workload = request.workload
    assert workload
    try:
        deployment = request.deployed(measured.arch)
        calls = served(deployment, workload)
    except ValueError as error:
        raise UsageError(str(error)) from None
    phases = list(simulate(workload.on_rank(deployment.dp)))
    steps = sum(phase.steps for phase in phases)
    decoding = sum(phase.steps for phase in phases if phase.lengths)
    prompts = workload.on_rank(deployment.dp).num_prompts
    text = (
        f"{deployment.text}, {workload.isl} tokens in, {workload.osl} out, {workload.concurrency} in flight"
    )
    return _weighed(measured, request, calls, text, workload, decoding / steps, prompts / steps)


def _recorded(measured: Measured) -> Mix:
    """The weights of suites are shares of an op's calls, so each op gets the same part of the time."""
    fastest: dict[str, float] = {}
    for (op, _), sheets in measured.sheets.items():
        us = min(row.us for row in sheets[0].rows) if sheets[0].rows else 0.0
        fastest[op] = fastest.get(op, 0.0) + (sheets[0].case.weight or 1.0) * us
    cases = []
    for key, sheets in measured.sheets.items():
        case, weighed = sheets[0].case, Weighed(key, sheets[0].case.sizes)
        weight = (case.weight or 1.0) / (fastest[case.op] or 1.0)
        if case.op == "mha_prefill" or "prefill" in case.place:
            weighed.prefill = weight
        else:
            weighed.decode = weight
        cases.append(weighed)
    text = "cases as the runs weigh them" + (
        ", each op with the same part of the time" if len(fastest) > 1 else ""
    )
    return Mix(text, cases, counts_calls=False)


def _weighed(
    measured: Measured,
    request: EngineRequest,
    calls: Sequence[Call],
    text: str,
    workload: Workload | None = None,
    decode_share: float = 0.0,
    prompts: float = 0.0,
) -> Mix:
    cases = {key: Weighed(key, sizes_of(sheets)) for key, sheets in measured.sheets.items()}
    uncovered, missed, parts = [], 0.0, shares(calls, request)
    for call, share in zip(calls, parts, strict=True):
        found = stand_ins(call, cases.values(), measured.arch)
        if not found:
            uncovered.append(_uncovered(call))
            missed += share
        for case, part in found:
            if call.prefill:
                case.prefill += call.times * part
            else:
                case.decode += call.times * part
    used = [case for case in cases.values() if case.calls]
    if request.cases:
        words = ["--cases", request.cases]
    else:
        split = request.deployed(measured.arch).attention.text.replace(" ", "-")
        name = request.model.name
        words = ["--suite", f"{'r1' if name == R1 else name}-{split}"]
    covered = max(0.0, 1 - missed)
    return Mix(text, used, True, workload, decode_share, prompts, uncovered, covered, words)


def _uncovered(call: Call) -> Weighed:
    return Weighed((call.op, text_of(call.sizes)), call.sizes)


def stand_ins(call: Call, cases: Iterable[Weighed], arch: str) -> list[tuple[Weighed, float]]:
    """The measured cases that stand for a call, each with its part of it: those at the next sizes to either
    side, by their distance in logarithms; beyond the last measured size that one, up to BEYOND, with as much
    more weight as the call is larger. Empty where none does."""
    op = kernels.OPS[call.op]
    fixed, axes = FIXED[call.op], AXES[call.op][1]
    wanted = op.case({**op.defaults(arch), **call.sizes}).sizes
    alike = [
        case
        for case in cases
        if case.op == call.op and all(_same(case.sizes, wanted, name) for name in fixed)
    ]
    if not alike:
        return []
    place = {id(case): _place(case.sizes, axes) for case in alike}
    first, *others = _place(wanted, axes)
    if others:  # those whose second size is nearest
        nearest = min(abs(place[id(case)][1] - others[0]) for case in alike)
        if nearest > math.log(BEYOND):
            return []
        alike = [case for case in alike if abs(place[id(case)][1] - others[0]) <= nearest + 1e-9]
    by_size = {place[id(case)][0]: case for case in reversed(alike)}
    below = max((size for size in by_size if size <= first), default=None)
    above = min((size for size in by_size if size >= first), default=None)
    if below is None or above is None:
        end = above if below is None else below
        assert end is not None
        if abs(end - first) > math.log(BEYOND):
            return []
        return [(by_size[end], max(1.0, math.exp(first - end)))]
    if below == above:
        return [(by_size[below], 1.0)]
    part = (first - below) / (above - below)
    return [(by_size[below], 1 - part), (by_size[above], part)]


def _same(a: Mapping[str, Size], b: Mapping[str, Size], name: str) -> bool:
    """Whether both have a size. A case has all sizes; one that is left out has its usual value."""
    usual: Mapping[str, Size] = {"q": 1, "prefix": "0", "routing": "uniform", "shared": 0, "ep": 1}
    return str(a.get(name, usual.get(name))) == str(b.get(name, usual.get(name)))


def _place(sizes: Mapping[str, Size], axes: Sequence[str]) -> list[float]:
    """The logarithms of the sizes that grow with the load, of a span its middle."""
    return [math.log(sum(parse_span(sizes[name])) / 2) for name in axes]
