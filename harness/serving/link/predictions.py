"""What a load comes to, which kernels it is made of, and what a change of kernels is worth."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from harness.errors import UsageError
from harness.serving.compare.identity import Setting
from harness.serving.ledger.ledger import KernelChange, Prediction, Quantities, Unit
from harness.serving.link.calibration import T90, Served
from harness.serving.link.load import Array, KernelSums, Load, Phase
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
QUANTITIES: tuple[tuple[Quantities, Unit], ...] = (
    ("tpot", "ms"), ("ttft", "ms"), ("output_throughput", "tok/s"), ("decode_step", "ms"), ("prefill", "ms")
)  # fmt: skip
"""TTFT is a client's mean, which `observe` reads."""

FORM = "OP[:PART][@decode|@prefill]=FACTORx[(LOW..HIGH)] or ...=saved:TIMEus[(LOW..HIGH)]"
_NUMBER = r"[0-9]*\.?[0-9]+(?:e[0-9]+)?"
_CHANGE = re.compile(
    rf"(?P<op>\w+)(?::(?P<part>[\w.]+))?(?:@(?P<phase>decode|prefill))?="
    rf"(?:(?P<factor>{_NUMBER})x|saved:(?P<saved>{_NUMBER})us)"
    rf"(?:\((?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})(?:x|us)?\))?"
)


def parse_change(text: str) -> KernelChange:
    """`mla_decode=2.0x`, `fused_moe=1.3x(1.2..1.4)`, `block_scale_gemm:qkv_a@decode=saved:5us`. Raises
    UsageError."""
    match = _CHANGE.fullmatch(text.replace(" ", ""))
    if not match:
        raise UsageError(f"cannot read change {text!r}; write {FORM}")
    if match["op"] not in OP_CLASSES:
        raise UsageError(f"unknown op {match['op']!r} in {text!r}; ops: {', '.join(OP_CLASSES)}")
    value = float(match["factor"] or match["saved"])
    low, high = (float(match[k]) if match[k] else None for k in ("low", "high"))
    if not 0 < (value if low is None else low) <= value <= (value if high is None else high) < math.inf:
        raise UsageError(f"cannot read change {text!r}: it must be positive and within its interval")
    phase = cast(Literal["decode", "prefill", "both"], match["phase"] or "both")
    change = KernelChange(op=match["op"], part=match["part"] or "", low=low, high=high, phase=phase)
    return change.model_copy(update={"factor" if match["factor"] else "saved_us": value})


def name_of(change: KernelChange) -> str:
    return f"{change.op}:{change.part}" if change.part else change.op


def touched(sums: KernelSums, change: KernelChange) -> list[tuple[str, Phase, list[int]]]:
    """(name, phase, terms) that a change touches. Raises UsageError where it touches none."""
    found = []
    for name, phase in (("decode", sums.decode), ("prefill", sums.prefill)):
        if change.phase in ("both", name) and (indices := phase.indices(change.op, change.part)):
            found.append((name, phase, indices))
    if not found:
        names = dict.fromkeys(t.name for p in (sums.decode, sums.prefill) for t in p.terms)
        where = "" if change.phase == "both" else f" of {change.phase}"
        raise UsageError(f"no kernel {name_of(change)!r} in a step{where}; there are: {', '.join(names)}")
    return found


def applied(
    sums: KernelSums, changes: Sequence[KernelChange], in_server: dict[str, float]
) -> tuple[KernelSums, KernelSums, list[str]]:
    """The sums before and after, and what is to be known of that, a line each.

    in_server: by phase, what a kernel's time is multiplied with in the server. A saving in us is of the
    server's own calls already, so that it is divided by that here. A saving of more than nine tenths of what
    the modelled kernel takes cannot be taken from it: then the server before the change was that much slower
    than the model, and the model is what comes after.
    """
    before = after = sums
    notes = []
    for change in changes:
        for name, phase, terms in touched(sums, change):
            calls = change.calls or sum(phase.terms[i].calls for i in terms)
            saved = (change.saved_us or 0.0) * calls / in_server[name]
            own = getattr(after, name).us.copy()
            if change.factor is not None:
                own[terms] /= change.factor
            elif saved <= 0.9 * float(phase.us[terms].sum(axis=0).min()):
                own[terms] -= saved / len(terms)
            else:
                own = getattr(before, name).us.copy()
                own[terms] += saved / len(terms)
                before = before.having(name, own)
                notes.append(
                    f"{change.op} in {name}: more is saved than the kernel takes here, so the server before "
                    "was slower than the model by that, and the model is what comes after"
                )
                continue
            after = after.having(name, own)
    return before, after, notes


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
    of_stall = served.stall_ms / max(sums.prefill.ms(1), 1e-9)
    beside_ms = float(link.constants.tpot.mean[0])
    # ms in decode steps, ms in stalls, where from, calls
    parts: dict[str, tuple[float, float, str, int]] = {BESIDE: (beside_ms, 0.0, "calibration", 1)}
    for term, us in zip(sums.decode.terms, sums.decode.at(found.batch), strict=True):
        parts[term.name] = (float(us) * link.in_server["decode"] / 1e3, 0.0, term.origin, term.calls)
    for term, us in zip(sums.prefill.terms, sums.prefill.at(1.0), strict=True):
        decode, _, origin, calls = parts.get(term.name, (0.0, 0.0, term.origin, term.calls))
        parts[term.name] = (decode, float(us) * of_stall / 1e3, origin, calls)
    tpot = served.tpot.value
    shares = [Share(name, origin, n, d, s, (d + s) / tpot) for name, (d, s, origin, n) in parts.items()]
    return Outlook(load, served, sums.capacity, tuple(sorted(shares, key=lambda share: -share.share)))


def predict(link: Link, load: Load, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    """What all the changes together are worth at a load, for each of QUANTITIES.

    Raises UsageError where a change touches no kernel of the model.
    """
    sums = link.sums(load)
    old, new, notes = applied(sums, changes, link.in_server)
    before, after = _quantities(link, old), _quantities(link, new)
    change, (less, more) = after - before, _uncertainty(link, sums, changes)
    lines = (*link.notes, *notes, *_assumptions(changes))
    names = ("before", "after", "change", "low", "high")
    columns = zip(before, after, change, change - less, change + more, strict=True)
    return tuple(
        Prediction(quantity=quantity, unit=unit, method="link", assumptions=lines,
                   **dict(zip(names, values, strict=True)))
        for (quantity, unit), values in zip(QUANTITIES, columns, strict=True)
    )  # fmt: skip


def _quantities(link: Link, sums: KernelSums) -> Array:
    """Of the central case, in the order of QUANTITIES."""
    served = link.constants.served(sums)
    values = (served.tpot, served.ttft_mean, served.output)
    return np.array([*(each.value for each in values), served.decode_ms, served.prefill_ms])


def _uncertainty(link: Link, sums: KernelSums, changes: Sequence[KernelChange]) -> Array:
    """How far the 90 % interval of what the changes are worth goes below it and above it, [2, QUANTITIES].

    Independent sources: the interval of each change itself, what a kernel saves in the server over what it
    saves alone, and of factors the kernel's time and k.
    """

    def worth(change: KernelChange) -> Array:
        old, new, _ = applied(sums, [change], link.in_server)
        return _quantities(link, new) - _quantities(link, old)

    def by_factor(alone: Array, deviation: float) -> Array:
        """deviation: of the logarithm of the factor"""
        ratio = math.exp(T90 * deviation)
        return np.array([alone * (1 / ratio - 1), alone * (ratio - 1)])

    ends: list[Array] = []  # of each source, what either end of its interval adds, [2, QUANTITIES]
    of_factors = np.zeros(len(QUANTITIES))
    for change in changes:
        alone = worth(change)
        ends.append(by_factor(alone, IN_SERVER))
        if change.low is not None and change.high is not None:
            value = "saved_us" if change.factor is None else "factor"
            own = [worth(change.model_copy(update={value: end})) for end in (change.low, change.high)]
            ends.append(np.array(own) - alone)
        if change.factor is not None:
            of_factors += alone
            _, phase, terms = touched(sums, change)[0]
            ends.append(by_factor(alone, OF_TIME[phase.terms[terms[0]].origin]))
    k = link.constants.tpot
    ends.append(by_factor(of_factors, float(k.deviation[1] / k.mean[1])))
    below, above = np.minimum(np.min(ends, axis=1), 0.0), np.maximum(np.max(ends, axis=1), 0.0)
    return np.sqrt([(below**2).sum(axis=0), (above**2).sum(axis=0)])


def _assumptions(changes: Sequence[KernelChange]) -> list[str]:
    exact = [change.op for change in changes if change.low is None]
    lines = [f"no interval was given for the change of {op}: it is taken as exact" for op in exact]
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
        return link.constants.served(applied(sums, changes, link.in_server)[1]).tpot.value

    before, limit = tpot(1.0), tpot(INFINITE)
    factor = None
    if target_ms is not None and target_ms > limit:
        factor = 1.0 if target_ms >= before else _factor(tpot, target_ms)
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
