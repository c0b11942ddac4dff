"""What a load comes to, which kernels it is made of, and what a change of kernels is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.serving.compare.identity import Setting
from harness.serving.ledger.prediction import KernelChange, Origin, Part, Prediction, QuantityName, Unit
from harness.serving.link.calibration import T90, Served
from harness.serving.link.changes import applied, name_of, touched
from harness.serving.link.load import KernelSums, Load
from harness.serving.link.model import Link
from harness.serving.link.times.assumed_times import DEVIATION
from harness.serving.op_classes import OP_CLASSES
from harness.serving.schema import OfferedLoad
from kernels import OPS

IN_SERVER = 0.1
"""Deviation of what a kernel saves in the server over what it saves alone: replays of a step came within
12 %, single calls within 15 % in the median."""
OF_TIME: dict[str, float] = {"measured": 0.05, "table": 0.1, "regression": 0.2, "assumed": DEVIATION}
"""Deviation of the logarithm of a kernel's time, by where it is from: tables jitter so at neighbouring
sizes."""
BESIDE = "beside its kernels"
INFINITE, CLOSE = 1e9, 1e-4
Worth = dict[QuantityName, float]


@dataclass(frozen=True)
class Share:
    """What one term takes of TPOT, ms: in decode steps, and in stalls by others' prefills. share: of TPOT"""

    name: str
    origin: str
    calls: int
    decode_ms: float
    stall_ms: float
    share: float


@dataclass(frozen=True)
class Need:
    """What one op of the suite, or all together, could give.

    factor:   speedup that reaches the target; None: no target, or none reaches it; 1: it is reached already
    limit_ms: TPOT were the op to take no time
    most_ms:  what it can take off TPOT, and share: of TPOT
    """

    ops: tuple[str, ...]
    factor: float | None
    limit_ms: float
    most_ms: float
    share: float


@dataclass(frozen=True)
class Outlook:
    """What is expected of a load.

    capacity: requests that the cache holds
    shares:   of every term, the largest first, and of what each step takes beside its kernels
    changes:  what all the changes are worth together; needs: what single ops could give
    """

    load: Load
    served: Served
    capacity: float
    shares: tuple[Share, ...]
    changes: tuple[Prediction, ...] = ()
    needs: tuple[Need, ...] = ()


def outlook(link: Link, load: Load) -> Outlook:
    sums, served = link.sums(load), link.served(load)
    found = served.features
    of_stall = served.stall_ms / max(found.prefill_ms, 1e-9)
    # ms in decode steps, ms in stalls, where from, calls
    parts: dict[str, tuple[float, float, str, int]] = {
        BESIDE: (float(link.constants.tpot.mean[0]), 0.0, "calibration", 1)
    }
    for term, us in zip(sums.decode.terms, sums.decode.at(found.batch), strict=True):
        parts[term.name] = (float(us) * link.in_server["decode"] / 1e3, 0.0, term.origin, term.calls)
    for term, us in zip(sums.prefill.terms, sums.prefill.at(1.0), strict=True):
        decode, _, origin, calls = parts.get(term.name, (0.0, 0.0, term.origin, term.calls))
        parts[term.name] = (decode, float(us) * of_stall / 1e3, origin, calls)
    shares = [
        Share(name, origin, calls, decode, stall, (decode + stall) / served.tpot.value)
        for name, (decode, stall, origin, calls) in parts.items()
    ]
    return Outlook(load, served, sums.capacity, tuple(sorted(shares, key=lambda share: -share.share)))


def predict(link: Link, load: Load, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    """What all the changes together are worth at a load: before and after, of TPOT, mean TTFT, throughput, a
    decode step and a prefill.

    Raises UsageError where a change touches no kernel of the model.
    """
    sums = link.sums(load)
    old, new, notes = applied(sums, changes, link.in_server)
    before, after = _quantities(link, old), _quantities(link, new)
    sources = _sources(link, sums, changes)
    lines = [*link.notes, *notes, *_assumptions(changes)]
    records = []
    for quantity, value in before.items():
        change = after[quantity] - value
        unit: Unit = "tok/s" if quantity == "output_throughput" else "ms"
        parts = [
            Part(
                what=what,
                origin=origin,
                value=change,
                low=change + min(0.0, *(end[quantity] for end in ends)),
                high=change + max(0.0, *(end[quantity] for end in ends)),
            )
            for what, origin, ends in sources
        ]
        records.append(
            Prediction(
                quantity=quantity,
                unit=unit,
                method="link",
                change=change,
                low=change - math.hypot(*(part.low - change for part in parts)),
                high=change + math.hypot(*(part.high - change for part in parts)),
                before=value,
                after=after[quantity],
                uncertainty=tuple(sorted(parts, key=lambda part: part.low - part.high)),
                assumptions=tuple(lines),
            )
        )
    return tuple(records)


def _quantities(link: Link, sums: KernelSums) -> Worth:
    """Of the central case. TTFT is a client's mean, which `observe` reads."""
    served = link.constants.served(sums, link.cold(sums.load))
    return {
        "tpot": served.tpot.value,
        "ttft": served.ttft_mean.value,
        "output_throughput": served.output.value,
        "decode_step": served.decode_ms,
        "prefill": served.prefill_ms,
    }


def _sources(
    link: Link, sums: KernelSums, changes: Sequence[KernelChange]
) -> list[tuple[str, Origin, tuple[Worth, Worth]]]:
    """What the worth of the changes is uncertain by: a name, from where, and what either end of its 90 %
    interval adds to it with all else held."""
    found: list[tuple[str, Origin, tuple[Worth, Worth]]] = []
    of_factors: Worth = {}
    for change in changes:
        name, alone = name_of(change), _worth(link, sums, change)
        if change.low is not None and change.high is not None:
            value = "saved_us" if change.factor is None else "factor"
            ends = [
                _worth(link, sums, change.model_copy(update={value: end}))
                for end in (change.low, change.high)
            ]
            low, high = ({q: end[q] - alone[q] for q in alone} for end in ends)
            found.append((f"change of {name}", "measured" if change.source else "assumed", (low, high)))
        found.append((f"{name} in the server", "assumed", _scaled(alone, IN_SERVER)))
        if change.factor is not None:
            of_factors = {q: of_factors.get(q, 0.0) + alone[q] for q in alone}
            _, phase, indices = touched(sums, change)[0]
            timed = phase.terms[indices[0]].origin
            found.append((f"time of {name}", timed, _scaled(alone, OF_TIME[timed])))
    if of_factors:
        k = link.constants.tpot
        known: Origin = "calibration" if link.calibrated_with else "assumed"
        ends_of_k = _scaled(of_factors, float(k.deviation[1] / k.mean[1]))
        found.append(("k, the server's factor on kernels", known, ends_of_k))
    return found


def _worth(link: Link, sums: KernelSums, change: KernelChange) -> Worth:
    old, new, _ = applied(sums, [change], link.in_server)
    before, after = _quantities(link, old), _quantities(link, new)
    return {quantity: after[quantity] - before[quantity] for quantity in before}


def _scaled(alone: Worth, deviation: float) -> tuple[Worth, Worth]:
    """What a factor adds to what is worth so much, whose logarithm has that deviation."""
    ratio = math.exp(T90 * deviation)
    return {q: alone[q] * (1 / ratio - 1) for q in alone}, {q: alone[q] * (ratio - 1) for q in alone}


def _assumptions(changes: Sequence[KernelChange]) -> list[str]:
    lines = [
        f"no interval was given for the change of {change.op}: it is taken as exact"
        for change in changes
        if change.low is None
    ]
    if any(change.op == "block_scale_gemm" and change.factor for change in changes):
        lines.append("a factor of block_scale_gemm holds for the product with its quantisation, as timed")
    return [*lines, "one stream: no kernel hides behind another (InferenceX issue 863 says so of a trace)"]


def setting_of(link: Link, load: Load) -> Setting:
    """What a prediction is of, as a ledger has it."""
    workload = OfferedLoad(
        input_len=load.mean_isl,
        output_len=load.mean_osl,
        range_ratio=load.range_ratio,
        concurrency=load.concurrency,
        request_rate=0.0,
        num_prompts=load.concurrency * load.waves,
    )
    return link.setting.model_copy(update={"recv_interval": load.recv_interval, "workload": workload})


def needs(link: Link, load: Load, target_ms: float | None = None) -> tuple[Need, ...]:
    """What each op of the suite that the model has could give, and all together. target_ms: None asks only
    for the most."""
    sums = link.sums(load)
    modelled = {term.op for phase in (sums.decode, sums.prefill) for term in phase.terms}
    ops = [op for op in OP_CLASSES if op in OPS and op in modelled]
    return tuple(_need(link, sums, target_ms, group) for group in [*((op,) for op in ops), tuple(ops)])


def _need(link: Link, sums: KernelSums, target_ms: float | None, ops: tuple[str, ...]) -> Need:
    def tpot(factor: float) -> float:
        changes = [KernelChange(op=op, factor=factor) for op in ops]
        return _quantities(link, applied(sums, changes, link.in_server)[1])["tpot"]

    before, limit = tpot(1.0), tpot(INFINITE)
    factor = None
    if target_ms is not None and target_ms >= before:
        factor = 1.0
    elif target_ms is not None and target_ms > limit:
        factor = _factor(tpot, target_ms)
    return Need(ops, factor, limit, before - limit, (before - limit) / before)


def _factor(tpot: Callable[[float], float], target_ms: float) -> float:
    """By bisection of the share of the time that stays, over which TPOT grows."""
    low, high = 0.0, 1.0
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        if tpot(1 / middle) > target_ms:
            high = middle
        else:
            low = middle
    return 2 / (low + high)
