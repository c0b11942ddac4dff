"""Predictions for a load: TPOT and TTFT, the share of each kernel, and the effect of faster kernels."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.errors import UsageError
from harness.report.text import ranged
from harness.serving.ledger import KernelChange, Prediction, Quantities, Unit
from harness.serving.link.calibration import T90, TPOT_CONSTANTS, Served
from harness.serving.link.kernel_times import DEVIATION
from harness.serving.link.load import Array, KernelSums, Load, Phase
from harness.serving.link.model import Link
from harness.serving.names import OP_CLASSES
from kernels import OPS

IN_SERVER = 0.1
"""Deviation of the ratio of the time that a kernel saves in the server to the time that it saves alone.
Replays of a step came within 12 %, single calls within 15 % in the median."""
TIME_DEVIATION: dict[str, float] = {"measured": 0.05, "table": 0.1, "regression": 0.2, "assumed": DEVIATION}
"""Deviation of the logarithm of a kernel's time, by its origin; for tables the jitter between sizes."""
BESIDE_KERNELS = "beside its kernels"
INFINITE = 1e9  # a speedup that leaves no time
SPEEDUP_TOLERANCE = 1e-4  # relative, of the speedup that a target needs
QUANTITIES: tuple[tuple[Quantities, Unit], ...] = (
    ("tpot", "ms"), ("ttft", "ms"), ("output_throughput", "tok/s"), ("decode_step", "ms"), ("prefill", "ms")
)  # fmt: skip
"""What `predict` predicts. TTFT is the mean, because `observe` reads a client's mean."""
SHOWN: dict[Quantities, str] = {"tpot": "TPOT", "output_throughput": "output", "ttft": "mean TTFT"}
"""The quantities of a prediction that are shown, with their names."""


def touched(sums: KernelSums, change: KernelChange) -> list[tuple[str, Phase, list[int]]]:
    """Of each phase that a change touches its name, the phase, and the indices of the touched terms. Raises
    UsageError if it touches none."""
    phases = {"decode": sums.decode, "prefill": sums.prefill}
    if change.phase != "both":
        phases = {change.phase: phases[change.phase]}
    touches = []
    for name, phase in phases.items():
        if terms := phase.indices(change.op, change.part):
            touches.append((name, phase, terms))
    if not touches:
        names = dict.fromkeys(term.name for phase in phases.values() for term in phase.terms)
        where = "" if change.phase == "both" else f" of {change.phase}"
        kernel = f"{change.op}:{change.part}" if change.part else change.op
        raise UsageError(f"no kernel {kernel!r} in a step{where}; there are: {', '.join(names)}")
    return touches


def applied(
    sums: KernelSums, changes: Sequence[KernelChange], in_server: dict[str, float]
) -> tuple[KernelSums, KernelSums, list[str]]:
    """The sums before and after the changes, and notes on them.

    in_server: by phase, the factor between a kernel's time in the server and alone

    A saving in us is measured in the server, so it is divided by that factor. If it is more than nine tenths
    of the kernel's modelled time, the server before the change was slower than the model. Then `sums` are of
    the state after the change, and the state before it is slower by the saving.
    """
    before = after = sums
    notes = []
    for change in changes:
        for name, phase, terms in touched(sums, change):
            calls = change.calls or sum(phase.terms[i].calls for i in terms)
            saved_us = (change.saved_us or 0.0) * calls / in_server[name]
            if saved_us > 0.9 * float(phase.us[terms].sum(axis=0).min()):
                before = _with_times(before, name, terms, 1.0, saved_us)
                notes.append(
                    f"{change.op} in {name}: more is saved than the kernel takes here, so the server before "
                    "was slower than the model by that, and the model is what comes after"
                )
            else:
                after = _with_times(after, name, terms, change.factor or 1.0, -saved_us)
    return before, after, notes


def _with_times(sums: KernelSums, name: str, terms: list[int], speedup: float, added_us: float) -> KernelSums:
    """The sums with other times of these terms of a phase. added_us: to all of them together"""
    phase = getattr(sums, name)
    us = phase.us.copy()
    us[terms] = us[terms] / speedup + added_us / len(terms)
    return replace(sums, **{name: replace(phase, us=us)})


@dataclass(frozen=True)
class Share:
    """The part of one kernel in TPOT."""

    name: str
    origin: str
    calls: int  # in a step
    decode_ms: float  # in a decode step
    stall_ms: float  # in the prefills of other requests, which stall decoding; for each token
    share: float  # of TPOT


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
    """What is predicted for a load, without changes and needs."""
    sums, served = link.sums(load), link.served(load)
    settled = served.features
    steps_per_token, _, _ = settled.tpot.tolist()
    accepted = 1 / steps_per_token
    # The stall of a token, as the number of prefills of one prompt whose kernels take as long alone.
    prefills = served.stall_ms / max(sums.prefill.ms(1), 1e-9)
    decode_us = sums.decode.us_at(settled.batch) * link.in_server["decode"]
    stall_us = sums.prefill.us_at(1.0) * prefills
    decode_ms = {term.name: float(us) / 1e3 for term, us in zip(sums.decode.terms, decode_us, strict=True)}
    stall_ms = {term.name: float(us) / 1e3 for term, us in zip(sums.prefill.terms, stall_us, strict=True)}
    terms = {term.name: term for term in (*sums.prefill.terms, *sums.decode.terms)}
    beside_ms, _, _ = link.constants.tpot.mean.tolist()  # the constant `a`
    tpot_ms = served.tpot.value
    beside_share = beside_ms / accepted / tpot_ms
    shares = [Share(BESIDE_KERNELS, "calibration", 1, decode_ms=beside_ms, stall_ms=0.0, share=beside_share)]
    for name, term in terms.items():
        in_decode, in_stall = decode_ms.get(name, 0.0), stall_ms.get(name, 0.0)
        share = (in_decode / accepted + in_stall) / tpot_ms
        shares.append(Share(name, term.origin, term.calls, in_decode, in_stall, share))
    return Outlook(sums.load, served, sums.capacity, tuple(sorted(shares, key=lambda share: -share.share)))


def predict(link: Link, load: Load, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    """The effect of all changes together on QUANTITIES. Raises UsageError for a change that touches no kernel
    of the step, and for two changes of one kernel."""
    sums = link.sums(load)
    kernels: Counter[str] = Counter()
    for change in changes:
        for name, phase, terms in touched(sums, change):
            kernels.update(f"{phase.terms[i].name} in {name}" for i in terms)
    for kernel, count in kernels.items():
        if count > 1:
            raise UsageError(f"two changes are of {kernel}: give one of them")
    sums_before, sums_after, notes = applied(sums, changes, link.in_server)
    before, after = _quantities(link, sums_before), _quantities(link, sums_after)
    change = after - before
    below, above = _uncertainty(link, sums, changes)
    notes = [*link.notes, *notes]
    exact = [change.op for change in changes if change.low is None]
    notes += [f"no interval was given for the change of {op}: it is taken as exact" for op in exact]
    if any(change.op == "block_scale_gemm" and change.factor for change in changes):
        notes.append("a factor of block_scale_gemm holds for the product with its quantisation, as timed")
    notes.append("one stream: no kernel hides behind another (InferenceX issue 863 says so of a trace)")
    return tuple(
        Prediction(
            quantity=quantity, unit=unit, method="link", assumptions=tuple(notes), before=before[i],
            after=after[i], change=change[i], low=change[i] - below[i], high=change[i] + above[i],
        )
        for i, (quantity, unit) in enumerate(QUANTITIES)
    )  # fmt: skip


def _quantities(link: Link, sums: KernelSums) -> Array:
    """The central values, in the order of QUANTITIES."""
    served = link.constants.served(sums)
    tpot, ttft, output = served.tpot.value, served.ttft_mean.value, served.output.value
    return np.array([tpot, ttft, output, served.decode_ms, served.prefill_ms])


def _uncertainty(link: Link, sums: KernelSums, changes: Sequence[KernelChange]) -> Array:
    """How far the 90 % interval of the effect of the changes reaches below and above it, [2, QUANTITIES].

    The sources are independent: the interval of each change, and the ratio of a saving in the server to that
    alone; for factors also the kernel's time and the constant k, for savings in us an unknown accept length.
    """

    def effect(change: KernelChange) -> Array:
        before, after, _ = applied(sums, [change], link.in_server)
        return _quantities(link, after) - _quantities(link, before)

    def reach(of_effect: Array, deviation: float) -> Array:
        """How far the ends of an effect lie from it, [2, QUANTITIES]. deviation: of the effect's logarithm"""
        ratio = math.exp(T90 * deviation)
        return np.array([of_effect * (1 / ratio - 1), of_effect * (ratio - 1)])

    reaches: list[Array] = []  # from the effect to both ends of its interval, by source
    of_factors = np.zeros(len(QUANTITIES))  # the effect of the changes that are given as a factor
    for change in changes:
        alone = effect(change)
        reaches.append(reach(alone, IN_SERVER))
        if change.low is not None and change.high is not None:
            field = "saved_us" if change.factor is None else "factor"
            low, high = (effect(change.model_copy(update={field: end})) for end in (change.low, change.high))
            reaches.append(np.array([low, high]) - alone)
        if change.factor is None:
            reaches.append(reach(alone, link.length_deviation))
        else:
            of_factors += alone
            _, phase, terms = touched(sums, change)[0]
            reaches.append(reach(alone, TIME_DEVIATION[phase.terms[terms[0]].origin]))
    k = TPOT_CONSTANTS.index("k")
    k_deviation = float(link.constants.tpot.deviation[k] / link.constants.tpot.mean[k])
    reaches.append(reach(of_factors, k_deviation))
    below = np.minimum(np.min(reaches, axis=1), 0.0)  # the lower end, [sources, QUANTITIES]
    above = np.maximum(np.max(reaches, axis=1), 0.0)
    return np.sqrt([(below**2).sum(axis=0), (above**2).sum(axis=0)])


def needs(link: Link, load: Load, target_ms: float | None = None) -> tuple[Need, ...]:
    """The largest effect of each op, and of all together. target_ms: the wanted TPOT, if there is one"""
    sums = link.sums(load)
    modelled = {term.op for phase in (sums.decode, sums.prefill) for term in phase.terms}
    ops = tuple(op for op in OP_CLASSES if op in OPS and op in modelled)

    def tpot_ms(sped_up: Sequence[str], factor: float) -> float:
        changes = [KernelChange(op=op, factor=factor) for op in sped_up]
        _, after, _ = applied(sums, changes, link.in_server)
        return link.constants.served(after).tpot.value

    before_ms = tpot_ms((), 1.0)
    needs = []
    each = [(op,) for op in ops]
    for sped_up in [*each, ops]:
        limit_ms, factor = tpot_ms(sped_up, INFINITE), None
        if target_ms is not None and target_ms > limit_ms:
            reached = target_ms >= before_ms
            factor = 1.0 if reached else _factor(functools.partial(tpot_ms, sped_up), target_ms)
        saved_ms = before_ms - limit_ms
        needs.append(Need(sped_up, factor, limit_ms, saved_ms, saved_ms / before_ms))
    return tuple(needs)


def _factor(tpot_ms: Callable[[float], float], target_ms: float) -> float:
    """The speedup that reaches a TPOT, by bisection over its inverse, with which TPOT grows."""
    low, high = 0.0, 1.0
    while high - low > SPEEDUP_TOLERANCE * high:
        middle = (low + high) / 2
        if tpot_ms(1 / middle) > target_ms:
            high = middle
        else:
            low = middle
    return 2 / (low + high)


def worth(what_if: Sequence[str], changes: Sequence[Prediction], concurrency: int) -> str:
    """What changes are worth: `mla_decode=2x: TPOT -5.4 % (-6.9 to -4.0) ...`. what_if: the user's words"""
    effects = {change.quantity: change_in_per_cent(change) for change in changes}
    shown = [f"{name} {effects[quantity]}" for quantity, name in SHOWN.items() if quantity in effects]
    return f"{', '.join(what_if)}: {', '.join(shown)}, at concurrency {concurrency}"


def change_in_per_cent(change: Prediction) -> str:
    """The change of a quantity in per cent, with its 90 % interval."""
    before = change.before or math.nan
    values = (change.change, change.low, change.high)
    middle, low, high = [None if value is None else 100 * value / before for value in values]
    return ranged(middle, low, high, "+.1f", " %")
