"""How often a server calls each measured case: the mix by which cases are weighed."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.catalogue.architectures import named_sheet
from harness.decide.measured import CaseKey, Measured, whole_sizes
from harness.engine import EngineRequest, shares
from harness.errors import UsageError
from harness.serving.link.kernel_times import AXES
from harness.serving.names import hardware_name
from kernels import engines
from shapes.case import Size, text_of
from shapes.cases import R1
from shapes.deployment import Call, served
from shapes.lengths import parse_span
from shapes.models import model, named_model
from shapes.scheduler import Workload, simulate
from shapes.suites import SPREAD, cases_file

BEYOND = 2.0
"""A factor beyond the measured sizes, up to which the nearest case stands for a call."""
NEAR = 1.1
"""A factor between contexts, or lengths of prompts, that count as one."""
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
    share: float = 0.0
    """The part of the four ops' time in a step that its calls take at the limits of the device's data
    sheet."""

    @property
    def op(self) -> str:
        return self.key[0]

    @property
    def text(self) -> str:
        return " ".join(self.key)

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
    loads: Sequence[Workload] = ()
    decode_share: float = 0.0
    """The share of steps that decode; 0 where it is not known."""
    prompts: float = 0.0
    """Prompts that are prefilled in a mean step; 0 where it is not known."""
    uncovered: Sequence[Weighed] = ()
    """Calls that no measured case stands for."""
    words: Sequence[str] = ()
    """The options by which `run` measures the calls' cases: a suite or a file."""
    server: Sequence[str] = ()
    """The flags by which the engine serves the model so."""

    def share_of(self, cases: Iterable[Weighed], op: str = "", phase: str = "") -> float:
        """The part of the time in a step that these cases have, of an op or all, of a phase or both; 1 where
        weights are not calls."""
        if not self.counts_calls:
            return 1.0
        every = sum(_share(case, op, phase) for case in (*self.cases, *self.uncovered))
        return sum(_share(case, op, phase) for case in cases) / every if every else 0.0

    @property
    def covered(self) -> float:
        return self.share_of(self.cases)


def _share(case: Weighed, op: str, phase: str) -> float:
    if op not in ("", case.op):
        return 0.0
    return case.share * (getattr(case, phase) / case.calls if phase else 1.0)


USUAL = Workload(3200, 800, 64, 64)
"""The load of AMD's and dstack's runs, of which the suites have the shapes."""
PLACE = re.compile(r"(\S+) ((?:(?:tp|dp|ep)\d+ )+)")
"""How the place of a case begins that names a model and its split: `deepseek-r1 tp8 decode`."""


def request_of(
    engine: str, measured: Measured, told: Mapping[str, Any], given: Mapping[str, str]
) -> EngineRequest | None:
    """The deployment by whose calls cases are weighed: as the user says it, else as the places of the runs'
    cases name it; None where neither names one. Raises UsageError for drafts without a file of cases.

    told: fields of EngineRequest that the user gave
    """
    if told.get("drafts") and not told.get("cases"):
        raise UsageError("--drafts: a load does not tell how many are accepted; --cases tells the calls")
    inferred = {} if {*told} & {"model", "tp", "ep", "dp_attention"} else _deployment(measured)
    if not (inferred or told):
        return None
    name = hardware_name(measured.device)
    fields = {"model": model(R1), **inferred, **{field: value for field, value in told.items() if value}}
    return EngineRequest(engine, name if named_sheet(name) else measured.arch, given=given, **fields)


def _deployment(measured: Measured) -> dict[str, Any]:
    """The model and its split that the places of most cases name (`deepseek-r1 tp8 decode`); empty where none
    does. Cases of steps that verify drafts do not count."""
    cases = [sheet.case for sheets in measured.sheets.values() for sheet in sheets]
    places = [PLACE.match(case.place) for case in cases if "draft" not in case.place]
    counts = Counter(place.groups() for place in places if place)
    if not counts:
        return {}
    (name, split), _ = counts.most_common(1)[0]
    try:
        named = named_model(name)
    except ValueError:
        return {}
    degrees = {word[:2]: int(word[2:]) for word in split.split()}
    dp = degrees.get("dp", 1)
    kv = {str(case.sizes["kv"]) for case in cases if "kv" in case.sizes}
    return {
        "model": named, "tp": degrees.get("tp", 1) * dp, "ep": degrees.get("ep", 1), "dp_attention": dp > 1,
        **({"kv": kv.pop()} if len(kv) == 1 else {}),
    }  # fmt: skip


def mix_of(measured: Measured, request: EngineRequest | None, loads: Sequence[Workload] = ()) -> Mix:
    """The mix of a deployment's loads, of which steps count alike, or of its file of cases; None: as the
    runs' suites weigh cases. Raises UsageError."""
    if request is None:
        return _recorded(measured)
    if request.cases:
        try:
            file = cases_file(request.cases)
        except ValueError as error:
            raise UsageError(str(error)) from None
        calls = [
            Call(each.op, {**each.sizes}, "", each.weight, each.place, prefill=_prefills(each.op, place))
            for each in file.cases
            if each.op in FIXED
            # A case without a place has the name of the file there, which says nothing.
            for place in ["" if each.place == request.cases else each.place]
        ]
        return _weighed(measured, request, calls, f"the calls of {request.cases}")
    loads = loads or (USUAL,)
    try:
        deployment = request.deployed(measured.arch)
        every = [served(deployment, load) for load in loads]
    except ValueError as error:
        raise UsageError(str(error)) from None
    calls = [replace(call, times=call.times / len(loads)) for of_load in every for call in of_load]
    steps = [_steps(load.on_rank(deployment.parallel.dp)) for load in loads]
    texts = [f"{load.isl} tokens in, {load.osl} out, {load.concurrency} in flight" for load in loads]
    mix = _weighed(measured, request, calls, f"{deployment.text}, {'; '.join(texts)}")
    decoding, prompts = (statistics.fmean(part) for part in zip(*steps, strict=True))
    return replace(mix, loads=loads, decode_share=decoding, prompts=prompts)


def _steps(load: Workload) -> tuple[float, float]:
    """The share of steps that decode, and the prompts of a mean step."""
    phases = list(simulate(load))
    steps = sum(phase.steps for phase in phases)
    return sum(phase.steps for phase in phases if phase.lengths) / steps, load.num_prompts / steps


def _prefills(op: str, place: str) -> bool:
    return op == "mha_prefill" or "prefill" in place


def _recorded(measured: Measured) -> Mix:
    """The weights of suites are shares of an op's calls, so each op gets the same part of the time."""
    fastest: dict[str, float] = {}
    for (op, _), sheets in measured.sheets.items():
        us = min(row.us for row in sheets[0].rows) if sheets[0].rows else 0.0
        fastest[op] = fastest.get(op, 0.0) + (sheets[0].case.weight or 1.0) * us
    cases = []
    for key, sheets in measured.sheets.items():
        case = sheets[0].case
        weighed = Weighed(key, whole_sizes(case.op, case.sizes, measured.arch))
        weight = (case.weight or 1.0) / (fastest[case.op] or 1.0)
        if _prefills(case.op, case.place):
            weighed.prefill = weight
        else:
            weighed.decode = weight
        cases.append(weighed)
    text = "cases as the runs weigh them" + (
        ", each op with the same part of the time" if len(fastest) > 1 else ""
    )
    return Mix(text, cases, counts_calls=False)


def _weighed(measured: Measured, request: EngineRequest, calls: Sequence[Call], text: str) -> Mix:
    cases = {
        key: Weighed(key, whole_sizes(key[0], sheets[0].case.sizes, measured.arch))
        for key, sheets in measured.sheets.items()
    }
    # Where cases differ in a page or dtype alone, those come first for which the engine's default was timed.
    ordered = sorted(cases.values(), key=lambda case: not _has_default(measured, request, case))
    uncovered = []
    for call, share in zip(calls, shares(calls, request), strict=True):
        found = stand_ins(call, ordered, measured.arch)
        if not found:
            whole = whole_sizes(call.op, call.sizes, measured.arch)
            uncovered.append(Weighed((call.op, text_of(call.sizes)), whole))
            found = [(uncovered[-1], 1.0)]
        for case, part in found:
            case.share += share * part / sum(part for _, part in found)
            if call.prefill:
                case.prefill += call.times * part
            else:
                case.decode += call.times * part
    used = [case for case in cases.values() if case.calls]
    uncovered.sort(key=lambda case: -case.share)
    words, flags = _words(request, measured), _server(request)
    return Mix(text, used, True, uncovered=uncovered, words=words, server=flags)


def _server(request: EngineRequest) -> list[str]:
    """Of each engine its own. None for DP attention, which takes several that depend on each other, and for a
    file of cases, which need not be of the model and ranks that the options name by default."""
    if request.dp_attention or request.cases:
        return []
    if request.engine == "vllm":
        flags = [f"--tensor-parallel-size {request.tp}", "--enable-expert-parallel", "--kv-cache-dtype fp8"]
    else:
        flags = [f"--tp-size {request.tp}", f"--ep-size {request.ep}", "--kv-cache-dtype fp8_e4m3"]
    given = (True, request.ep > 1, request.kv == "fp8")
    return [flag for flag, is_given in zip(flags, given, strict=True) if is_given]


def _has_default(measured: Measured, request: EngineRequest, case: Weighed) -> bool:
    choice = engines.choices(case.op, measured.arch, case.sizes, request.given).get(request.engine)
    timed = (row.cell.impl for sheet in measured.sheets[case.key] for row in sheet.rows)
    return bool(choice and choice.row in timed)


def _words(request: EngineRequest, measured: Measured) -> list[str]:
    """The options by which `run` measures the calls; none where no suite has them, as with an FP8 cache."""
    if request.cases:
        return ["--cases", request.cases]
    if request.kv != "bf16":
        return []
    parallel = request.deployed(measured.arch).parallel
    known = (name for name, model, split in SPREAD if (model, split) == (request.model.name, parallel))
    other = f"{request.model.name}-{parallel.text.replace(' ', '-')}"
    return ["--suite", next(known, other)]


def stand_ins(call: Call, cases: Iterable[Weighed], arch: str) -> list[tuple[Weighed, float]]:
    """The measured cases that stand for a call, each with its part of it: those at the next sizes to either
    side, by their distance in logarithms; beyond the last measured size that one, up to BEYOND, with as much
    more weight as the call is larger. Empty where none does. Of cases at one place the first counts."""
    fixed, axes = FIXED[call.op], AXES[call.op][1]
    wanted = whole_sizes(call.op, call.sizes, arch)
    alike = [
        case
        for case in cases
        if case.op == call.op and all(str(case.sizes.get(name)) == str(wanted.get(name)) for name in fixed)
    ]
    if not alike:
        return []
    place = {id(case): _place(case.sizes, axes) for case in alike}
    first, *others = _place(wanted, axes)
    if others:  # those whose second size is about the nearest
        nearest = min(abs(place[id(case)][1] - others[0]) for case in alike)
        if nearest > math.log(BEYOND):
            return []
        most = nearest + math.log(NEAR)
        alike = [case for case in alike if abs(place[id(case)][1] - others[0]) <= most]
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


def _place(sizes: Mapping[str, Size], axes: Sequence[str]) -> list[float]:
    """The logarithms of the sizes that grow with the load, of a span its middle."""
    return [math.log(sum(parse_span(sizes[name])) / 2) for name in axes]
