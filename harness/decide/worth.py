"""What a decision saves in serving: time of each token and prompt; TPOT and TTFT by `serving predict`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.decide.choices import Launches
from harness.decide.decision import MARGIN, Choice, Decision, decide
from harness.decide.measured import Measured
from harness.decide.mix import mix_of, request_of
from harness.engine import EngineRequest
from harness.errors import HarnessError, UsageError
from harness.report.text import grouped
from harness.serving.ledger import KernelChange, Prediction
from harness.serving.link.load import Load
from harness.serving.link.model import SAME_LAYERS, System, link
from harness.serving.link.predictions import predict
from harness.serving.names import hardware_name
from harness.statistics.totals import total_ratio
from shapes.scheduler import Workload

PREDICT_CONFIDENCE = 0.9  # of the intervals that `predict` takes and gives
PHASES: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")


@dataclass(frozen=True)
class Worth:
    """What a decision saves. The milliseconds are sums over the calls of the four ops alone, as timed."""

    step_ms: float  # saved in a mean step
    token_ms: float  # saved of TPOT, in which the prefills of other requests count; 0: not known
    prompt_ms: float  # saved in the prefill of one prompt; 0: not known
    changes: Sequence[KernelChange]  # what the decision does to each op, by phase
    predicted: Mapping[int, Sequence[Prediction]]  # TPOT and others, by the number of requests in flight
    why_not: str  # why `serving predict` predicts nothing; empty: it does


def decision_and_worth(
    engine: str, measured: Measured, user_fields: Mapping[str, Any], settings: Mapping[str, str],
    margin: float = MARGIN, loads: Sequence[Workload] = (),
) -> tuple[Decision, Worth | None]:  # fmt: skip
    """The decision, and what it is worth; None for that where nothing is chosen, or the mix does not count
    calls. Raises UsageError.

    user_fields: fields of EngineRequest that the user gave
    settings:    what is set for the engine already
    loads:       by which cases are weighed; none: the usual one, where the user or the runs name a model
    """
    request = request_of(engine, measured, user_fields, settings)
    if loads and request is None:
        raise UsageError(
            "--workload needs a model whose steps verify no drafts: give --model and --tp, or --cases"
        )
    mix = mix_of(measured, request, loads)
    decision = decide(Launches(engine, measured, mix, settings), margin)
    worth = None
    if decision.gain and mix.counts_calls:
        worth = _worth(decision, decision.gain, request)
    return decision, worth


def _worth(decision: Decision, gain: Choice, request: EngineRequest | None) -> Worth:
    mix = decision.mix
    ms_per_call = [(pair.case, (pair.us - pair.new_us) / 1e3) for pair in gain.pairs]
    prefill_ms = sum(case.prefill * ms for case, ms in ms_per_call)  # saved by its calls in a mean step
    step_ms = prefill_ms + sum(case.decode * ms for case, ms in ms_per_call)
    token_ms = step_ms / mix.decode_share if mix.decode_share else 0.0  # only steps that decode give a token
    prompt_ms = prefill_ms / mix.prompts if mix.prompts else 0.0
    changes = [*_changes(decision)]
    predicted, why_not = _predictions(decision, request, changes)
    return Worth(step_ms, token_ms, prompt_ms, changes, predicted, why_not)


def _changes(decision: Decision) -> Iterator[KernelChange]:
    """The factor of each op in each phase over all of its calls; those not measured count as unchanged."""
    for op, pairs in grouped((case.chosen for case in decision.cases), lambda pair: pair.case.op).items():
        for phase in PHASES:
            in_phase = [pair for pair in pairs if pair.case.calls_in(phase)]
            if all(pair.is_unchanged for pair in in_phase):
                continue
            series = [pair.series(pair.case.calls_in(phase)) for pair in in_phase]
            measured = total_ratio(series, confidence=PREDICT_CONFIDENCE)
            measured_share = sum(pair.case.share_in(phase) for pair in in_phase)
            op_share = sum(case.share_in(phase) for case in decision.mix.every if case.op == op)
            part = measured_share / op_share
            yield KernelChange(
                op=op, factor=_over_all(measured.ratio, part), low=_over_all(measured.low, part),
                high=_over_all(measured.high, part), phase=phase, source=str(in_phase[0].sheet.folder),
            )  # fmt: skip


def _over_all(ratio: float, part: float) -> float:
    """The factor by which a time becomes shorter if this part of it becomes shorter by the ratio."""
    return 1 / (1 - part * (1 - 1 / ratio))


def _predictions(
    decision: Decision, request: EngineRequest | None, changes: Sequence[KernelChange]
) -> tuple[dict[int, Sequence[Prediction]], str]:
    """What `serving predict` says, by the number of requests in flight, and why it says nothing."""
    loads = decision.mix.loads
    if request is None or not loads:
        return {}, "`serving predict` needs a load: give --workload"
    if not SAME_LAYERS.fullmatch(request.model.name) or request.dp_attention:
        return {}, "`serving predict` models DeepSeek-R1 and V3 without DP attention alone"
    kv = "bfloat16" if request.kv == "bf16" else request.kv
    system = System(
        hardware=hardware_name(decision.launches.measured.device), engine=request.engine, tp=request.tp,
        ep=request.ep, kv=kv, drafts=request.drafts,
    )  # fmt: skip
    predicted: dict[int, Sequence[Prediction]] = {}
    try:
        for workload in loads:
            concurrency = workload.concurrency
            load = Load(workload.isl, workload.osl, concurrency, range_ratio=workload.range_ratio)
            predicted[concurrency] = predict(link(system), load, changes)
    except HarnessError as error:
        return {}, str(error)
    return predicted, ""
