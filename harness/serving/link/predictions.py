"""What a load comes to, which kernels it is made of, and what a change of kernels is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.serving.ledger.prediction import KernelChange, Origin, Part, Prediction, QuantityName
from harness.serving.link.calibration import T90, Value
from harness.serving.link.changes import applied, at_end, exceeds, touched
from harness.serving.link.closed_loop import Features, settled
from harness.serving.link.kernel_sums import KernelSums, Phase
from harness.serving.link.load import Load
from harness.serving.link.model import Link
from harness.serving.op_classes import OP_CLASSES
from kernels import OPS

IN_SERVER = 0.1
"""Deviation of what a kernel saves in the server over what it saves alone: replays of a step came within
12 %, single calls within 15 % in the median."""
UNITS = {"tpot": "ms", "ttft": "ms", "output_throughput": "tok/s", "decode_step": "ms", "prefill": "ms"}
SMALL = 1e-9
BESIDE = "beside its kernels"
INFINITE, CLOSE = 1e9, 1e-4


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
    """What is expected of a load, and of changes to its kernels.

    ttft:     after the first wave, as a client's median; ttft_mean: over the whole run
    output:   tokens/s of the instance; capacity: requests that the cache holds
    decode_ms, stall_ms: of TPOT, in the server; prefill_ms: of one prompt there
    changes:  of all changes together; needs: of single ops
    """

    load: Load
    tpot: Value
    ttft: Value
    ttft_mean: Value
    output: Value
    batch: float
    capacity: float
    decode_ms: float
    stall_ms: float
    prefill_ms: float
    shares: tuple[Share, ...]
    changes: tuple[Prediction, ...] = ()
    needs: tuple[Need, ...] = ()


def outlook(
    link: Link, load: Load, changes: Sequence[KernelChange] = (), target_tpot_ms: float | None = None
) -> Outlook:
    served = link.served(load)
    found = served.features
    a, k, p = link.constants.tpot.mean
    return Outlook(
        load,
        served.tpot,
        served.ttft,
        served.ttft_mean,
        served.output,
        found.batch,
        link.sums(load).capacity,
        float(a + k * found.decode_ms),
        float(p * found.stall_ms),
        float(link.constants.ttft.mean[1] * found.prefill_ms),
        tuple(_shares(link, load, found, served.tpot.value)),
        predict(link, load, changes) if changes else (),
        tuple(needs(link, load, target_tpot_ms)) if changes or target_tpot_ms else (),
    )


def _shares(link: Link, load: Load, found: Features, tpot_ms: float) -> list[Share]:
    """Of every term, the largest first, and of what each step takes beside its kernels."""
    sums = link.sums(load)
    a, k, p = (float(value) for value in link.constants.tpot.mean)
    parts: dict[str, list[float]] = {}
    about: dict[str, tuple[str, int]] = {}
    of_stall = p * found.stall_ms / max(found.prefill_ms, SMALL)
    for place, phase, at, ratio in ((0, sums.decode, found.batch, k), (1, sums.prefill, 1.0, of_stall)):
        for term, us in zip(phase.terms, phase.at(at), strict=True):
            about.setdefault(term.name, (term.origin, term.calls))
            parts.setdefault(term.name, [0.0, 0.0])[place] += float(us) * ratio / 1e3
    parts[BESIDE], about[BESIDE] = [a, 0.0], ("calibration", 1)
    shares = [
        Share(name, *about[name], decode, stall, (decode + stall) / tpot_ms)
        for name, (decode, stall) in parts.items()
    ]
    return sorted(shares, key=lambda share: -share.share)


def predict(link: Link, load: Load, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    """What all the changes together are worth at a load: a record for each of UNITS, before and after.

    Raises UsageError where a change touches no kernel of the model.
    """
    sums = link.sums(load)
    both = applied(sums, changes, _in_server(link))
    before, after = (_quantities(link, each) for each in both)
    sources = _sources(link, sums, changes)
    records = []
    for quantity in before:
        change = after[quantity] - before[quantity]
        parts = [_part(source, quantity) for source in sources]
        low, high = (
            math.hypot(*(getattr(part, end) - part.value for part in parts)) for end in ("low", "high")
        )
        records.append(
            Prediction(
                quantity=quantity,
                unit="tok/s" if UNITS[quantity] == "tok/s" else "ms",
                method="link",
                change=change,
                low=change - low,
                high=change + high,
                before=before[quantity],
                after=after[quantity],
                parts=tuple(_tpot_parts(link, *both)) if quantity == "tpot" else (),
                uncertainty=tuple(sorted(parts, key=lambda part: part.low - part.high)),
                assumptions=tuple(assumptions(link, load, changes)),
            )
        )
    return tuple(records)


def _in_server(link: Link) -> tuple[float, float]:
    """What kernels' times are multiplied with in decode steps and in stalls."""
    _, k, p = (float(value) for value in link.constants.tpot.mean)
    return k, p


def _quantities(link: Link, sums: KernelSums) -> dict[QuantityName, float]:
    """Of the central case."""
    load, constants = sums.load, link.constants
    found = settled(sums, constants.tpot.mean, constants.ttft.mean, link.cold(load))
    tpot = float(found.tpot @ constants.tpot.mean)
    ttft = float(found.mean @ constants.ttft.mean) + found.waiting_mean
    life = ttft + (load.mean_osl - 1) * tpot
    return {
        "tpot": tpot,
        "ttft": ttft,  # as a client's mean, which `observe` reads
        "output_throughput": load.concurrency * load.mean_osl / life * 1e3,
        "decode_step": float(constants.tpot.mean[:2] @ [1.0, found.decode_ms]),
        "prefill": float(constants.ttft.mean[1]) * found.prefill_ms,
    }


@dataclass(frozen=True)
class Source:
    """One thing that a change's worth is uncertain by: the change of each quantity as it is, and at either
    end of the source's 90 % interval with all else held."""

    what: str
    origin: Origin
    ends: tuple[dict[QuantityName, float], dict[QuantityName, float], dict[QuantityName, float]]


def _sources(link: Link, sums: KernelSums, changes: Sequence[KernelChange]) -> list[Source]:
    base = _worth(link, sums, changes)
    found: list[Source] = []
    of_factors = dict.fromkeys(base, 0.0)
    for change in changes:
        name = f"{change.op}:{change.part}" if change.part else change.op
        alone = _worth(link, sums, [change])
        if change.low is not None and change.high is not None:
            ends = [_worth(link, sums, [at_end(change, end)]) for end in (change.low, change.high)]
            moved = [_moved(base, alone, end, 1.0) for end in ends]
            origin: Origin = "measured" if change.source else "assumed"
            found.append(Source(f"change of {name}", origin, (base, moved[0], moved[1])))
        found.append(_scaled(f"{name} in the server", "assumed", base, alone, IN_SERVER))
        if change.factor is not None:
            of_factors = {q: of_factors[q] + alone[q] for q in base}
            phases = touched(sums, change)
            found.append(_scaled(f"time of {name}", _origin(phases), base, alone, _deviation(phases)))
    if any(of_factors.values()):
        share = float(link.constants.tpot.deviation[1] / link.constants.tpot.mean[1])
        known: Origin = "calibration" if link.sources else "assumed"
        found.append(_scaled("k, the server's factor on kernels", known, base, of_factors, share))
    return found


def _worth(link: Link, sums: KernelSums, changes: Sequence[KernelChange]) -> dict[QuantityName, float]:
    before, after = (_quantities(link, each) for each in applied(sums, changes, _in_server(link)))
    return {quantity: after[quantity] - before[quantity] for quantity in before}


def _moved(
    base: dict[QuantityName, float],
    alone: dict[QuantityName, float],
    end: dict[QuantityName, float],
    ratio: float,
) -> dict[QuantityName, float]:
    """All changes, where one that is worth `alone` is worth `ratio` times `end`."""
    return {q: base[q] - alone[q] + ratio * end[q] for q in base}


def _scaled(
    what: str,
    origin: Origin,
    base: dict[QuantityName, float],
    alone: dict[QuantityName, float],
    deviation: float,
) -> Source:
    """By a factor of what is worth `alone`, whose logarithm has that deviation."""
    ratio = math.exp(T90 * deviation)
    low, high = _moved(base, alone, alone, 1 / ratio), _moved(base, alone, alone, ratio)
    return Source(what, origin, (base, low, high))


def _part(source: Source, quantity: QuantityName) -> Part:
    value, *ends = (end[quantity] for end in source.ends)
    return Part(
        what=source.what,
        origin=source.origin,
        value=value,
        low=min(value, *ends),
        high=max(value, *ends),
    )


def _origin(phases: Sequence[tuple[str, Phase, list[int]]]) -> Origin:
    _, phase, indices = phases[0]
    return phase.terms[indices[0]].origin


def _deviation(phases: Sequence[tuple[str, Phase, list[int]]]) -> float:
    """Of the logarithm of the changed kernels' time: terms of one table err together."""
    _, phase, indices = phases[0]
    weight = phase.us[indices].mean(axis=1)
    return float(weight @ phase.deviation[indices] / weight.sum())


def _tpot_parts(link: Link, before: KernelSums, after: KernelSums) -> list[Part]:
    """Of the change of TPOT: what decode steps and stalls give at the batch as it was, and what the change of
    the batch adds. They sum to it."""
    constants = link.constants
    cold = link.cold(before.load)
    old = settled(before, constants.tpot.mean, constants.ttft.mean, cold)
    new = settled(after, constants.tpot.mean, constants.ttft.mean, cold)
    k, p = _in_server(link)
    decode = k * (after.decode_ms(old.batch) - before.decode_ms(old.batch))
    stall = p * old.stall_ms * (after.prefill_ms(1) / before.prefill_ms(1) - 1)
    whole = float((new.tpot - old.tpot) @ constants.tpot.mean)
    values = {
        "decode steps": decode,
        "stalls by others' prefills": stall,
        "the batch, which the change moves": whole - decode - stall,
    }
    return [
        Part(what=what, origin="calibration", value=value, low=value, high=value)
        for what, value in values.items()
        if abs(value) > SMALL
    ]


def assumptions(link: Link, load: Load, changes: Sequence[KernelChange]) -> list[str]:
    """What was taken for granted, one line each."""
    sums, lines = link.sums(load), [*link.notes]
    for change in changes:
        if change.low is None:
            lines.append(f"no interval was given for the change of {change.op}: it is taken as exact")
        if change.op == "block_scale_gemm" and change.factor:
            lines.append("a factor of block_scale_gemm holds for the product with its quantisation, as timed")
        for name, phase, indices in touched(sums, change):
            calls = change.calls or sum(phase.terms[i].calls for i in indices)
            ratio = _in_server(link)[("decode", "prefill").index(name)]
            if change.saved_us and exceeds(phase, indices, change.saved_us * calls / ratio):
                lines.append(
                    f"{change.op} in {name}: more is saved than the kernel takes here, so the server before "
                    "was slower than the model by that, and the model is what comes after"
                )
    lines.append("one stream: no kernel hides behind another (InferenceX issue 863 says so of a trace)")
    return lines


# What single ops could give


def needs(link: Link, load: Load, target_ms: float | None) -> list[Need]:
    """Of each op of the suite that the model has, and of all together. target_ms: None asks only for the
    most."""
    sums = link.sums(load)
    modelled = {term.op for phase in (sums.decode, sums.prefill) for term in phase.terms}
    ops = [op for op in OP_CLASSES if op in OPS and op in modelled]
    return [_need(link, sums, target_ms, group) for group in [*((op,) for op in ops), tuple(ops)]]


def _need(link: Link, sums: KernelSums, target_ms: float | None, ops: tuple[str, ...]) -> Need:
    def tpot(factor: float) -> float:
        changes = [KernelChange(op=op, factor=factor) for op in ops]
        return _quantities(link, applied(sums, changes, _in_server(link))[1])["tpot"]

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
