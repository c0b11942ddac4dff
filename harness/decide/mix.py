"""How often a server calls each measured case: the mix by which cases are weighed."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

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
from shapes.suites import DEPLOYED, cases_file

BEYOND = 2.0  # the factor beyond the measured sizes up to which the nearest case stands for a call
NEAR = 1.1  # the factor between contexts, or lengths of prompts, that count as one
FIXED = {op: fixed for op, (fixed, _) in AXES.items()}
FIXED["fused_moe"] += ("routing",)
"""Op -> the sizes in which a call and a case have to agree."""


@dataclass
class WeighedCase:
    """A case with its calls in the mean step of the server."""

    key: CaseKey
    sizes: Mapping[str, Size]
    decode: float = 0.0  # calls in steps that only decode
    prefill: float = 0.0  # calls in steps with prompt tokens
    share: float = 0.0  # the part of the four ops' time in a step that its calls take at the device's limits

    @property
    def op(self) -> str:
        return self.key[0]

    @property
    def sizes_text(self) -> str:
        return self.key[1]

    @property
    def text(self) -> str:
        return " ".join(self.key)

    @property
    def calls(self) -> float:
        return self.decode + self.prefill

    def count(self, calls: float, prefill: bool) -> None:
        if prefill:
            self.prefill += calls
        else:
            self.decode += calls

    def calls_in(self, phase: Literal["decode", "prefill"]) -> float:
        return self.decode if phase == "decode" else self.prefill

    def share_in(self, phase: Literal["decode", "prefill"]) -> float:
        """The part of `share` that its calls in this phase take."""
        return self.share * self.calls_in(phase) / self.calls


@dataclass(frozen=True)
class Mix:
    """The cases of a decision."""

    text: str  # what the weights are, for people
    cases: Sequence[WeighedCase]
    counts_calls: bool  # whether weights are calls of a step, so that times of several ops add up
    loads: Sequence[Workload] = ()
    decode_share: float = 0.0  # the share of steps that decode; 0: not known
    prompts: float = 0.0  # the prompts that a mean step prefills; 0: not known
    uncovered: Sequence[WeighedCase] = ()  # calls that no measured case stands for
    run_options: Sequence[str] = ()  # the options by which `run` measures the calls' cases: a suite or a file
    server_flags: Sequence[str] = ()  # by which the engine serves the model in this deployment

    @property
    def every(self) -> list[WeighedCase]:
        return [*self.cases, *self.uncovered]

    def share_of(self, cases: Iterable[WeighedCase]) -> float:
        """The part of the four ops' time in a step that these cases have; 1 where weights are not calls."""
        if not self.counts_calls:
            return 1.0
        total = sum(case.share for case in self.every)
        return sum(case.share for case in cases) / total if total else 0.0

    @property
    def covered(self) -> float:
        """The part of that time that has measured cases."""
        return self.share_of(self.cases)


USUAL = Workload(3200, 800, 64, 64)  # the load of AMD's and dstack's runs, whose shapes the suites have
PLACE = re.compile(r"(\S+) ((?:(?:tp|dp|ep)\d+ )+)")
"""The beginning of a place that names a model and its split: `deepseek-r1 tp8 decode`."""


def request_of(
    engine: str, measured: Measured, user_fields: Mapping[str, Any], settings: Mapping[str, str]
) -> EngineRequest | None:
    """The deployment by whose calls cases are weighed: what the user says, else what the places of the runs'
    cases name; None where neither names one. Raises UsageError for drafts without a file of cases.

    user_fields: fields of EngineRequest that the user gave
    settings:    what is set for the engine already
    """
    if user_fields.get("drafts") and not user_fields.get("cases"):
        raise UsageError("--drafts: a load does not tell how many are accepted; --cases tells the calls")
    inferred: dict[str, Any] = {}
    if user_fields.keys().isdisjoint({"model", "tp", "ep", "dp_attention"}):
        inferred = _deployment(measured)
    if not (inferred or user_fields):
        return None
    name = hardware_name(measured.device)
    arch = name if named_sheet(name) else measured.arch
    fields = {"model": model(R1)} | inferred | {name: value for name, value in user_fields.items() if value}
    return EngineRequest(engine, arch, given=settings, **fields)


def _deployment(measured: Measured) -> dict[str, Any]:
    """The model and its split that the places of most cases name, as fields of EngineRequest; empty where no
    place does. Cases of steps that verify drafts do not count."""
    cases = [sheet.case for sheets in measured.sheets.values() for sheet in sheets]
    places = [PLACE.match(case.place) for case in cases if "draft" not in case.place]
    counts = Counter(place.groups() for place in places if place)
    if not counts:
        return {}
    name, split = max(counts, key=counts.__getitem__)
    try:
        deployment: dict[str, Any] = {"model": named_model(name)}
    except ValueError:
        return {}
    degrees = {word[:2]: int(word[2:]) for word in split.split()}
    dp = degrees.get("dp", 1)
    deployment |= {"tp": degrees.get("tp", 1) * dp, "ep": degrees.get("ep", 1), "dp_attention": dp > 1}
    kv = {str(case.sizes["kv"]) for case in cases if "kv" in case.sizes}
    if len(kv) == 1:
        deployment["kv"] = kv.pop()
    return deployment


def mix_of(measured: Measured, request: EngineRequest | None, loads: Sequence[Workload] = ()) -> Mix:
    """The mix of a deployment's loads, whose steps count alike, or of its file of cases. Without a request it
    has the weights that the runs' suites give to cases. Raises UsageError."""
    if request is None:
        return _mix_of_suites(measured)
    if request.cases:
        calls = _calls_of_file(request.cases)
        return _weighed(measured, request, calls, f"the calls of {request.cases}")
    loads = loads or (USUAL,)
    calls = []
    try:
        deployment = request.deployed(measured.arch)
        for load in loads:
            calls += [replace(call, times=call.times / len(loads)) for call in served(deployment, load)]
    except ValueError as error:
        raise UsageError(str(error)) from None
    texts = [f"{load.isl} tokens in, {load.osl} out, {load.concurrency} in flight" for load in loads]
    mix = _weighed(measured, request, calls, f"{deployment.text}, {'; '.join(texts)}")
    steps = [_decode_share_and_prompts(load.on_rank(deployment.parallel.dp)) for load in loads]
    decode_share = statistics.fmean(share for share, _ in steps)
    prompts = statistics.fmean(prompts for _, prompts in steps)
    return replace(mix, loads=loads, decode_share=decode_share, prompts=prompts)


def _calls_of_file(path: str) -> list[Call]:
    """Raises UsageError."""
    try:
        file = cases_file(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    calls = []
    for case in file.cases:
        if case.op in FIXED:
            # A case without a place has the name of the file there, which says nothing.
            prefill = _prefills(case.op, "" if case.place == path else case.place)
            calls.append(Call(case.op, {**case.sizes}, "", case.weight, case.place, prefill=prefill))
    return calls


def _decode_share_and_prompts(load: Workload) -> tuple[float, float]:
    """The share of steps that decode, and the prompts of a mean step."""
    phases = list(simulate(load))
    steps = sum(phase.steps for phase in phases)
    decoding = sum(phase.steps for phase in phases if phase.lengths)
    return decoding / steps, load.num_prompts / steps


def _prefills(op: str, place: str) -> bool:
    """Whether a case of the op at this place of a model is of steps with prompt tokens."""
    return op == "mha_prefill" or "prefill" in place


def _mix_of_suites(measured: Measured) -> Mix:
    """The mix by the weights of suites. These are shares of the calls of one op, and do not say how often an
    op is called. So each op is given the same part of the time, by the fastest row of each case."""
    op_us: dict[str, float] = {}
    for (op, _), sheets in measured.sheets.items():
        us = min(row.us for row in sheets[0].rows) if sheets[0].rows else 0.0
        op_us[op] = op_us.get(op, 0.0) + (sheets[0].case.weight or 1.0) * us
    cases = _uncounted_cases(measured)
    for weighed in cases:
        case = measured.sheets[weighed.key][0].case
        weight = (case.weight or 1.0) / (op_us[case.op] or 1.0)
        weighed.count(weight, _prefills(case.op, case.place))
    text = "cases as the runs weigh them"
    if len(op_us) > 1:
        text += ", each op with the same part of the time"
    return Mix(text, cases, counts_calls=False)


def _uncounted_cases(measured: Measured) -> list[WeighedCase]:
    """The measured cases, without calls."""
    return [
        WeighedCase(key, whole_sizes(key[0], sheets[0].case.sizes, measured.arch))
        for key, sheets in measured.sheets.items()
    ]


def _weighed(measured: Measured, request: EngineRequest, calls: Sequence[Call], text: str) -> Mix:
    """The mix in which the measured cases stand for these calls."""
    cases = _uncounted_cases(measured)
    # Where cases differ in a page or dtype alone, those come first for which the engine's default was timed.
    ordered = sorted(cases, key=lambda case: not _has_default(measured, request, case))
    uncovered = []
    for call, share in zip(calls, shares(calls, request), strict=True):
        parts = stand_ins(call, ordered, measured.arch)
        if not parts:
            new = WeighedCase((call.op, text_of(call.sizes)), whole_sizes(call.op, call.sizes, measured.arch))
            uncovered.append(new)
            parts = [(new, 1.0)]
        # The parts of a call beyond the measured sizes sum to more than 1, but its share must not grow.
        all_parts = sum(part for _, part in parts)
        for case, part in parts:
            case.share += share * part / all_parts
            case.count(call.times * part, call.prefill)
    uncovered.sort(key=lambda case: -case.share)
    return Mix(
        text, [case for case in cases if case.calls], counts_calls=True, uncovered=uncovered,
        run_options=_run_options(request, measured), server_flags=_server_flags(request),
    )  # fmt: skip


def _server_flags(request: EngineRequest) -> list[str]:
    """The flags of the engine for the deployment. None are given for DP attention, whose flags depend on each
    other, nor for a file of cases, which may be of another model and other ranks than the defaults."""
    if request.dp_attention or request.cases:
        return []
    if request.engine == "vllm":
        tp, ep, fp8 = f"--tensor-parallel-size {request.tp}", "--enable-expert-parallel", "fp8"
    else:
        tp, ep, fp8 = f"--tp-size {request.tp}", f"--ep-size {request.ep}", "fp8_e4m3"
    flags = [tp]
    if request.ep > 1:
        flags.append(ep)
    if request.kv == "fp8":
        flags.append(f"--kv-cache-dtype {fp8}")
    return flags


def _has_default(measured: Measured, request: EngineRequest, case: WeighedCase) -> bool:
    """Whether a run timed the row that the engine runs for the case by default."""
    choice = engines.choices(case.op, measured.arch, case.sizes, request.given).get(request.engine)
    timed = (row.cell.impl for sheet in measured.sheets[case.key] for row in sheet.rows)
    return bool(choice and choice.row in timed)


def _run_options(request: EngineRequest, measured: Measured) -> list[str]:
    """The options by which `run` measures the calls; none where no suite has them, as with an FP8 cache."""
    if request.cases:
        return ["--cases", request.cases]
    if request.kv != "bf16":
        return []
    parallel = request.deployed(measured.arch).parallel
    suites = {deployed: name for name, deployed in DEPLOYED.items()}
    general_name = f"{request.model.name}-{parallel.text.replace(' ', '-')}"
    return ["--suite", suites.get((request.model.name, parallel), general_name)]


def stand_ins(call: Call, cases: Iterable[WeighedCase], arch: str) -> list[tuple[WeighedCase, float]]:
    """The measured cases that stand for a call, each with the part of the call for which it stands. Two sizes
    may grow with the load (`_log_sizes`). Only the cases count that are nearest in the second one. Of these,
    the next smaller and the next larger case in the first size share the call, linearly in logarithms. A call
    beyond the measured sizes, by at most the factor BEYOND, counts as several calls of the last case. Of
    several cases with the same sizes the first counts. Empty where no case is near enough."""
    sizes = whole_sizes(call.op, call.sizes, arch)
    fixed = {name: str(sizes.get(name)) for name in FIXED[call.op]}
    log_size, log_second = _log_sizes(call.op, sizes)
    alike = []  # logarithm of the first size, distance of that of the second to the call's, case
    for case in cases:
        if case.op == call.op and all(str(case.sizes.get(name)) == value for name, value in fixed.items()):
            case_log_size, case_log_second = _log_sizes(case.op, case.sizes)
            alike.append((case_log_size, abs(case_log_second - log_second), case))
    nearest = min((distance for _, distance, _ in alike), default=math.inf)
    if nearest > math.log(BEYOND):
        return []
    # Of cases with the same first size the dict keeps the last, so they are reversed.
    by_log = {log: case for log, distance, case in reversed(alike) if distance <= nearest + math.log(NEAR)}
    below = max((log for log in by_log if log <= log_size), default=None)
    above = min((log for log in by_log if log >= log_size), default=None)
    if below is None or above is None:
        end = min(by_log, key=lambda log: abs(log - log_size))
        if abs(end - log_size) > math.log(BEYOND):
            return []
        return [(by_log[end], max(1.0, math.exp(log_size - end)))]
    if log_size in by_log:
        return [(by_log[log_size], 1.0)]
    part = (log_size - below) / (above - below)
    return [(by_log[below], 1 - part), (by_log[above], part)]


def _log_sizes(op: str, sizes: Mapping[str, Size]) -> tuple[float, float]:
    """The logarithms of the two sizes that grow with the load, of a span its middle; 0 for no second size."""
    _, growing = AXES[op]
    logs = [math.log(sum(parse_span(sizes[name])) / 2) for name in growing]
    return logs[0], logs[1] if len(logs) > 1 else 0.0
