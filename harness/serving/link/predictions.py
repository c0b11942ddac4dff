"""Predictions for a load: TPOT and TTFT, the share of each kernel, and the effect of faster kernels."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import UsageError
from harness.serving.compare.identity import Setting
from harness.serving.ledger import KernelChange, Prediction, Quantities, Unit
from harness.serving.link.calibration import T90, Served
from harness.serving.link.kernel_times import DEVIATION
from harness.serving.link.load import Array, KernelSums, Load, Phase
from harness.serving.link.model import Link
from harness.serving.names import OP_CLASSES
from harness.serving.schema import OfferedLoad
from kernels import OPS
from shapes.names import unknown

IN_SERVER = 0.1
"""Deviation of the ratio of the time that a kernel saves in the server to the time that it saves alone.
Replays of a step came within 12 %, single calls within 15 % in the median."""
OF_TIME: dict[str, float] = {"measured": 0.05, "table": 0.1, "regression": 0.2, "assumed": DEVIATION}
"""Deviation of the logarithm of a kernel's time, by its origin; for tables the jitter between sizes."""
MODELLED = ("fused_moe", "block_scale_gemm", "mla_decode", "mha_prefill", "all_reduce", "bf16_gemm",
            "absorbed_bmm", "elementwise")  # fmt: skip
BESIDE = "beside its kernels"
INFINITE, CLOSE = 1e9, 1e-4
QUANTITIES: tuple[tuple[Quantities, Unit], ...] = (
    ("tpot", "ms"), ("ttft", "ms"), ("output_throughput", "tok/s"), ("decode_step", "ms"), ("prefill", "ms")
)  # fmt: skip
"""What `predict` predicts. TTFT is the mean, because `observe` reads a client's mean."""

FORM = "OP[:PART][@decode|@prefill]=FACTORx[(LOW..HIGH)] or ...=saved:TIMEus[(LOW..HIGH)]"
_NUMBER = r"[0-9]*\.?[0-9]+(?:e[0-9]+)?"
_CHANGE = re.compile(
    rf"(?P<op>\w+)(?::(?P<part>[\w.]+))?(?:@(?P<phase>decode|prefill))?="
    rf"(?:(?P<factor>{_NUMBER})x|saved:(?P<saved_us>{_NUMBER})us)"
    rf"(?:\((?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})(?:x|us)?\))?"
)


def parse_change(text: str) -> KernelChange:
    """The change that a text describes: `mla_decode=2.0x`, `fused_moe=1.3x(1.2..1.4)`,
    `block_scale_gemm:qkv_a@decode=saved:5us`. Raises UsageError."""
    match = _CHANGE.fullmatch(text.replace(" ", ""))
    if not match:
        raise UsageError(f"cannot read change {text!r}; write for example mla_decode=2.0x, or {FORM}")
    if match["op"] not in OP_CLASSES:
        raise UsageError(unknown("op", match["op"], MODELLED))
    value = float(match["factor"] or match["saved_us"])
    if not 0 < float(match["low"] or value) <= value <= float(match["high"] or value) < math.inf:
        raise UsageError(f"cannot read change {text!r}: it must be positive and within its interval")
    return KernelChange.model_validate({name: given for name, given in match.groupdict().items() if given})


def touched(sums: KernelSums, change: KernelChange) -> list[tuple[str, Phase, list[int]]]:
    """Name, phase and indices of the terms that a change touches. Raises UsageError if it touches none."""
    phases = (("decode", sums.decode), ("prefill", sums.prefill))
    found = [(name, phase, phase.indices(change.op, change.part))
             for name, phase in phases if change.phase in ("both", name)]  # fmt: skip
    if not any(terms for *_, terms in found):
        names = dict.fromkeys(term.name for _, phase, _ in found for term in phase.terms)
        where = "" if change.phase == "both" else f" of {change.phase}"
        kernel = f"{change.op}:{change.part}" if change.part else change.op
        raise UsageError(f"no kernel {kernel!r} in a step{where}; there are: {', '.join(names)}")
    return [each for each in found if each[2]]


def applied(
    sums: KernelSums, changes: Sequence[KernelChange], in_server: dict[str, float]
) -> tuple[KernelSums, KernelSums, list[str]]:
    """The sums before and after the changes, and notes on them.

    in_server: by phase, the factor between a kernel's time in the server and alone

    A saving in us is measured in the server, so it is divided by that factor. A kernel cannot save more than
    nine tenths of its modelled time. If the saving is larger, the server was slower than the model before the
    change, and the model is taken for the state after it.
    """
    before = after = sums
    notes = []
    for change in changes:
        for name, phase, terms in touched(sums, change):
            calls = change.calls or sum(phase.terms[i].calls for i in terms)
            saved = (change.saved_us or 0.0) * calls / in_server[name]
            us = getattr(after, name).us.copy()
            if saved > 0.9 * float(phase.us[terms].sum(axis=0).min()):
                us = getattr(before, name).us.copy()
                us[terms] += saved / len(terms)
                before = before.having(name, us)
                notes.append(
                    f"{change.op} in {name}: more is saved than the kernel takes here, so the server before "
                    "was slower than the model by that, and the model is what comes after"
                )
                continue
            us[terms] = us[terms] / (change.factor or 1.0) - saved / len(terms)
            after = after.having(name, us)
    return before, after, notes


@dataclass(frozen=True)
class Share:
    """The part of one kernel in TPOT.

    calls:     in a step
    decode_ms: its time in decode steps
    stall_ms:  its time in the prefills of other requests, which stall decoding
    share:     of TPOT
    """

    name: str
    origin: str
    calls: int
    decode_ms: float
    stall_ms: float
    share: float


@dataclass(frozen=True)
class Need:
    """The effect on TPOT of one op of the suite, or of all of them together.

    factor:   speedup that reaches the target; None: no target, or no speedup reaches it; 1: it is reached now
    limit_ms: TPOT if the op took no time
    most_ms:  the most that a faster op can save of TPOT
    share:    `most_ms` as a share of TPOT
    """

    ops: tuple[str, ...]
    factor: float | None
    limit_ms: float
    most_ms: float
    share: float

    @property
    def name(self) -> str:
        return self.ops[0] if len(self.ops) == 1 else "all of these alike"

    @property
    def reach(self) -> str:
        """The factor as text."""
        if self.factor is None:
            return "not reachable"
        return "reached already" if self.factor == 1.0 else f"{self.factor:.3g}x"


@dataclass(frozen=True)
class Outlook:
    """All that is predicted for a load.

    capacity: requests that the cache holds
    shares:   of each kernel, and of the time of a step beside its kernels; the largest first
    changes:  the effect of all the changes together
    needs:    the effect that single ops can have
    """

    load: Load
    served: Served
    capacity: float
    shares: tuple[Share, ...]
    changes: tuple[Prediction, ...] = ()
    needs: tuple[Need, ...] = ()


def outlook(link: Link, load: Load) -> Outlook:
    sums, served = link.sums(load), link.served(load)
    found, beside_ms = served.features, float(link.constants.tpot.mean[0])
    accepted = float(1 / found.tpot[0])
    of_stall = served.stall_ms / max(sums.prefill.ms(1), 1e-9)
    decode_us = sums.decode.at(found.batch) * link.in_server["decode"]
    # by name: origin, calls, ms in decode steps, ms in stalls
    parts: dict[str, tuple[str, int, float, float]] = {BESIDE: ("calibration", 1, beside_ms, 0.0)}
    for term, us in zip(sums.decode.terms, decode_us, strict=True):
        parts[term.name] = (term.origin, term.calls, float(us) / 1e3, 0.0)
    for term, us in zip(sums.prefill.terms, sums.prefill.at(1.0) * of_stall, strict=True):
        origin, calls, decode_ms, _ = parts.get(term.name, (term.origin, term.calls, 0.0, 0.0))
        parts[term.name] = (origin, calls, decode_ms, float(us) / 1e3)
    of_token = {name: part[2] / accepted + part[3] for name, part in parts.items()}
    shares = [Share(name, *part, of_token[name] / served.tpot.value) for name, part in parts.items()]
    return Outlook(sums.load, served, sums.capacity, tuple(sorted(shares, key=lambda share: -share.share)))


def predict(link: Link, load: Load, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    """The effect of all changes together on QUANTITIES. Raises UsageError for kernels of none or of two."""
    sums = link.sums(load)
    found = [each for change in changes for each in touched(sums, change)]
    kernels = [f"{phase.terms[i].name} in {name}" for name, phase, terms in found for i in terms]
    if twice := next((one for one in kernels if kernels.count(one) > 1), ""):
        raise UsageError(f"two changes are of {twice}: give one of them")
    old, new, notes = applied(sums, changes, link.in_server)
    before, after = _quantities(link, old), _quantities(link, new)
    change, (less, more) = after - before, _uncertainty(link, sums, changes)
    notes = [*link.notes, *notes]
    exact = [change.op for change in changes if change.low is None]
    notes += [f"no interval was given for the change of {op}: it is taken as exact" for op in exact]
    if any(change.op == "block_scale_gemm" and change.factor for change in changes):
        notes.append("a factor of block_scale_gemm holds for the product with its quantisation, as timed")
    notes.append("one stream: no kernel hides behind another (InferenceX issue 863 says so of a trace)")
    names = ("before", "after", "change", "low", "high")
    columns = zip(before, after, change, change - less, change + more, strict=True)
    return tuple(
        Prediction(quantity=quantity, unit=unit, method="link", assumptions=tuple(notes),
                   **dict(zip(names, values, strict=True)))
        for (quantity, unit), values in zip(QUANTITIES, columns, strict=True)
    )  # fmt: skip


def _quantities(link: Link, sums: KernelSums) -> Array:
    """The central values, in the order of QUANTITIES."""
    served = link.constants.served(sums)
    values = (served.tpot, served.ttft_mean, served.output)
    return np.array([*(each.value for each in values), served.decode_ms, served.prefill_ms])


def _uncertainty(link: Link, sums: KernelSums, changes: Sequence[KernelChange]) -> Array:
    """How far the 90 % interval of the effect of the changes reaches below and above it, [2, QUANTITIES].

    The sources are independent: the interval of each change; the saving in the server over the saving alone;
    for factors, the kernel's time and k; for savings in microseconds, an unknown accept length.
    """

    def worth(change: KernelChange) -> Array:
        old, new, _ = applied(sums, [change], link.in_server)
        return _quantities(link, new) - _quantities(link, old)

    def by_factor(alone: Array, deviation: float) -> Array:
        """Both ends of the effect. deviation: that of the logarithm of the factor"""
        ratio = math.exp(T90 * deviation)
        return np.array([alone * (1 / ratio - 1), alone * (ratio - 1)])

    ends: list[Array] = []  # for each source, what both ends of its interval add, [2, QUANTITIES]
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
        else:
            ends.append(by_factor(alone, link.unsure))
    k = link.constants.tpot
    ends.append(by_factor(of_factors, float(k.deviation[1] / k.mean[1])))
    below, above = np.minimum(np.min(ends, axis=1), 0.0), np.maximum(np.max(ends, axis=1), 0.0)
    return np.sqrt([(below**2).sum(axis=0), (above**2).sum(axis=0)])


def setting_of(link: Link, load: Load) -> Setting:
    """The setting of a prediction, as a ledger records it."""
    workload = OfferedLoad(
        input_len=load.mean_isl, output_len=load.mean_osl, range_ratio=load.range_ratio, request_rate=0.0,
        concurrency=load.concurrency, num_prompts=load.concurrency * load.waves,
    )  # fmt: skip
    return link.setting.model_copy(update={"recv_interval": load.recv_interval, "workload": workload})


def needs(link: Link, load: Load, target_ms: float | None = None) -> tuple[Need, ...]:
    """The largest effect of each op, and of all together. target_ms: the wanted TPOT, if there is one"""
    sums = link.sums(load)
    modelled = {term.op for phase in (sums.decode, sums.prefill) for term in phase.terms}
    single = [op for op in OP_CLASSES if op in OPS and op in modelled]

    def tpot(ops: Sequence[str], factor: float) -> float:
        changes = [KernelChange(op=op, factor=factor) for op in ops]
        return link.constants.served(applied(sums, changes, link.in_server)[1]).tpot.value

    before, found = tpot((), 1.0), []
    for ops in (*((op,) for op in single), tuple(single)):
        limit, factor = tpot(ops, INFINITE), None
        if target_ms is not None and target_ms > limit:
            factor = 1.0 if target_ms >= before else _factor(functools.partial(tpot, ops), target_ms)
        found.append(Need(ops, factor, limit, before - limit, (before - limit) / before))
    return tuple(found)


def _factor(tpot: Callable[[float], float], target_ms: float) -> float:
    """The speedup that reaches a TPOT, by bisection over its inverse, with which TPOT grows."""
    low, high = 0.0, 1.0
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        if tpot(1 / middle) > target_ms:
            high = middle
        else:
            low = middle
    return 2 / (low + high)
