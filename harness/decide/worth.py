"""What a decision is worth in serving: time saved of each token and each prompt, and TPOT and TTFT by the
model of `serving predict`, where it knows the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.decide.choices import Launches
from harness.decide.decision import MARGIN, Compared, Decision, decide
from harness.decide.measured import Measured
from harness.decide.mix import mix_of, request_of
from harness.engine import EngineRequest
from harness.errors import HarnessError, UsageError
from harness.serving.ledger import KernelChange, Prediction
from harness.serving.link.load import Load
from harness.serving.link.model import SAME_LAYERS, System, link
from harness.serving.link.predictions import predict
from harness.serving.names import hardware_name
from harness.statistics.totals import total_ratio
from shapes.scheduler import Workload

LINKED = 0.9
"""The confidence of intervals that `predict` takes and gives."""
PHASES: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")


@dataclass(frozen=True)
class Worth:
    """ms are sums over the calls of the four ops alone, as timed.

    step_ms:   saved of a mean step
    token_ms:  of each token that a request gets, other requests' prefills included; 0 where the share of
               decode steps is not known
    prompt_ms: of the prefill of one prompt; 0 where it is not known
    changes:   what the decision does to each op, by phase
    predicted: of TPOT and others, by `serving predict`, by the requests in flight; empty where `why_not`
               says why
    """

    step_ms: float
    token_ms: float
    prompt_ms: float
    changes: Sequence[KernelChange]
    predicted: Mapping[int, Sequence[Prediction]]
    why_not: str


def decided(
    engine: str,
    measured: Measured,
    told: Mapping[str, Any],
    given: Mapping[str, str],
    margin: float = MARGIN,
    loads: Sequence[Workload] = (),
) -> tuple[Decision, Worth | None]:
    """The decision and what it is worth: None where nothing is chosen, or the mix does not count calls.
    Raises UsageError.

    told:  fields of EngineRequest that the user gave
    given: what is set for the engine already
    loads: by which cases are weighed; none: the usual one, where a model is told or named by the runs
    """
    request = request_of(engine, measured, told, given)
    if loads and request is None:
        raise UsageError(
            "--workload needs a model whose steps verify no drafts: give --model and --tp, or --cases"
        )
    mix = mix_of(measured, request, loads)
    decision = decide(Launches(engine, measured, mix, given), margin)
    return decision, _worth(decision, decision.gain, request) if decision.gain and mix.counts_calls else None


def _worth(decision: Decision, gain: Compared, request: EngineRequest | None) -> Worth:
    mix = decision.mix
    saved = [(pair.case, (pair.us - pair.new_us) / 1e3) for pair in gain.pairs]
    prefill = sum(case.prefill * ms for case, ms in saved)
    step = prefill + sum(case.decode * ms for case, ms in saved)
    changes = [*_changes(decision)]
    predicted, why_not = _linked(decision, request, changes)
    return Worth(
        step, step / mix.decode_share if mix.decode_share else 0.0,
        prefill / mix.prompts if mix.prompts else 0.0, changes, predicted, why_not,
    )  # fmt: skip


def _changes(decision: Decision) -> Iterator[KernelChange]:
    """The factor of each op in each phase, over all of its calls: those that run the same count too, and
    calls that were not measured count as unchanged."""
    mix = decision.mix
    every = [each.chosen for each in decision.cases]
    for op in dict.fromkeys(pair.case.op for pair in every):
        for phase in PHASES:
            own = [pair for pair in every if pair.case.op == op and getattr(pair.case, phase)]
            if all(pair.same for pair in own):
                continue
            found = total_ratio([pair.series(getattr(pair.case, phase)) for pair in own], confidence=LINKED)
            part = sum(pair.case.share_in(phase) for pair in own)
            part /= sum(case.share_in(phase) for case in mix.every if case.op == op)
            low, factor, high = (1 / (1 - part * (1 - 1 / x)) for x in (found.low, found.ratio, found.high))
            source = str(own[0].sheet.folder)
            yield KernelChange(op=op, factor=factor, low=low, high=high, phase=phase, source=source)


def _linked(
    decision: Decision, request: EngineRequest | None, changes: Sequence[KernelChange]
) -> tuple[dict[int, Sequence[Prediction]], str]:
    loads, measured = decision.mix.loads, decision.launches.measured
    if request is None or not loads:
        return {}, "`serving predict` needs a load: give --workload"
    if not SAME_LAYERS.fullmatch(request.model.name) or request.dp_attention:
        return {}, "`serving predict` models DeepSeek-R1 and V3 without DP attention alone"
    kv = {"bf16": "bfloat16"}.get(request.kv, request.kv)
    system = System(
        hardware=hardware_name(measured.device), engine=request.engine, tp=request.tp, ep=request.ep, kv=kv,
        drafts=request.drafts,
    )  # fmt: skip
    asked = [Load(each.isl, each.osl, each.concurrency, range_ratio=each.range_ratio) for each in loads]
    try:
        return {load.concurrency: predict(link(system), load, changes) for load in asked}, ""
    except HarnessError as error:
        return {}, str(error)
