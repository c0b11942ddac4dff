"""Predictions as records: what a change is worth, from which terms, and from where its interval comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.serving.ledger.prediction import KernelChange, Origin, Part, Prediction, QuantityName
from harness.serving.link.changes import applied, phases, slower_before
from harness.serving.link.closed_loop import Array, ClosedLoop, ServingTimes
from harness.serving.link.model import Link
from harness.serving.link.simulation import MOST_REQUESTS, OpenLoop, SimulatedRun, requests_of
from harness.serving.link.step_times import Draws, StepTimes, kappa_at, term_us
from harness.serving.link.uncertainty import DRAWS_ALONE, interval, sources

QUANTITIES: tuple[tuple[QuantityName, Literal["ms", "tok/s"]], ...] = (
    ("tpot", "ms"),
    ("ttft", "ms"),
    ("output_throughput", "tok/s"),
    ("decode_step", "ms"),
    ("prefill", "ms"),  # of one prompt
)
SMALL = 1e-9
SIMULATED, LEAST_SIMULATED = 60, 12  # draws of which requests are simulated; of runs of many requests fewer
SIMULATED_REQUESTS = 120_000  # in all draws


@dataclass(frozen=True)
class Value:
    """A number with its 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: Array) -> Value:
        return cls(float(draws[0]), *interval(draws))

    def over(self, count: float) -> Value:
        return Value(self.value / count, self.low / count, self.high / count)

    def covers(self, measured: float) -> bool:
        return self.low <= measured <= self.high


@dataclass(frozen=True)
class Share:
    """What one term takes of TPOT, ms: in decode steps, and in the stalls of others' prefills."""

    name: str
    origin: str
    calls: int
    decode_ms: float
    stall_ms: float
    share: Value


@dataclass(frozen=True)
class Outlook:
    """What is expected of a workload without any change.

    ttft_p99: of requests one by one, and tpot_one_by_one, ms, the mean of theirs in the central draw; None
              where a run has too many requests to simulate
    output:   tokens/s of the instance
    """

    load: ClosedLoop
    tpot: Value
    tpot_one_by_one: float | None
    ttft: Value
    ttft_mean: Value
    ttft_p99: Value | None
    output: Value
    batch: float
    capacity: float
    decode_ms: float
    stall_ms: float
    prefill_ms: float
    shares: tuple[Share, ...]


def outlook(link: Link, load: ClosedLoop) -> Outlook:
    world = link.world()
    steps = link.steps(load)
    draws = link.draws(load, world, link.fitted(world))
    times = steps.serving(draws)
    runs = _simulated(steps, draws) if requests_of(load) <= MOST_REQUESTS else []
    return Outlook(
        load,
        Value.of(times.tpot),
        float(runs[0].tpot.mean()) if runs else None,
        Value.of(times.ttft),
        Value.of(times.ttft_mean),
        Value.of(np.array([_p99(load, run) for run in runs])) if runs else None,
        Value.of(times.output),
        float(times.batch[0]),
        steps.capacity,
        float(times.decode[0]),
        float(times.stall[0]),
        float(times.prefill[0]),
        tuple(_shares(steps, draws, times)),
    )


def _p99(load: ClosedLoop, run: SimulatedRun) -> float:
    """Of TTFT over a whole run; where it has no end, after the first wave."""
    return float(np.percentile(run.ttft[0 if load.waves else load.concurrency :], 99))


def _simulated(steps: StepTimes, draws: Draws) -> list[SimulatedRun]:
    count = SIMULATED_REQUESTS // requests_of(steps.load)
    return steps.simulated(draws.some(min(max(count, LEAST_SIMULATED), SIMULATED)))


@dataclass(frozen=True)
class OpenOutlook:
    """What is expected of requests that come at a rate.

    output: tokens/s of the instance; falls_behind: the share of draws in which more come than are served
    """

    load: OpenLoop
    tpot: Value
    ttft_median: Value
    ttft_mean: Value
    ttft_p99: Value
    output: Value
    batch: float
    falls_behind: float


def open_outlook(link: Link, load: OpenLoop) -> OpenOutlook:
    world = link.world()
    runs = _simulated(link.steps(load), link.draws(load, world, link.fitted(world)))

    def value(of: Callable[[SimulatedRun], float]) -> Value:
        return Value.of(np.array([of(run) for run in runs]))

    return OpenOutlook(
        load,
        value(lambda run: float(run.tpot.mean())),
        value(lambda run: float(np.median(run.ttft))),
        value(lambda run: float(run.ttft.mean())),
        value(lambda run: float(np.percentile(run.ttft, 99))),
        value(lambda run: run.tokens / run.duration * 1e3),
        runs[0].batch,
        sum(run.falls_behind for run in runs) / len(runs),
    )


def predict(link: Link, load: ClosedLoop, changes: Sequence[KernelChange]) -> list[Prediction]:
    """One record for each of QUANTITIES, before and after all changes together.

    Raises UsageError where a change touches no kernel of the model.
    """
    world = link.world()
    before, after = link.serving(load, changes, world)
    alone = {
        name: link.serving(load, changes, link.world(DRAWS_ALONE, [name])) for name in _sources(link, load)
    }
    records = []
    for quantity, unit in QUANTITIES:
        difference = _of(after, quantity) - _of(before, quantity)
        low, high = interval(difference)
        records.append(
            Prediction(
                quantity=quantity,
                unit=unit,
                method="link",
                change=float(difference[0]),
                low=low,
                high=high,
                before=float(_of(before, quantity)[0]),
                after=float(_of(after, quantity)[0]),
                parts=tuple(_tpot_parts(link, load, changes, before, after)) if quantity == "tpot" else (),
                uncertainty=tuple(_breakdown(link, load, changes, alone, quantity)),
                assumptions=tuple(assumptions(link, load, changes)),
            )
        )
    return records


def assumptions(link: Link, load: ClosedLoop, changes: Sequence[KernelChange]) -> list[str]:
    """What was taken for granted, one line each."""
    steps = link.steps(load)
    lines = [*link.notes]
    for change in changes:
        if change.low is None:
            lines.append(f"nobody gave an interval for the change of {change.op}: it is taken as exact alone")
        if change.op == "block_scale_gemm" and change.factor:
            lines.append("a factor of block_scale_gemm holds for the product with its quantisation, as timed")
        for name, phase, indices in phases(steps, change):
            if slower_before(phase, indices, change):
                lines.append(
                    f"{change.op} in {name}: more is saved than the kernel takes here, so the server before "
                    "was slower than the model by that, and the model is what comes after"
                )
    kinds = {t.op for p in (steps.decode, steps.prefill) for t in p.terms if t.origin == "assumed"}
    lines.append(
        f"assumed, in no table: {', '.join(sorted(kinds))} between the timed kernels, and the host's gaps"
    )
    if link.exposure is None:
        lines.append(
            "assumed: one stream, nothing hides behind anything (InferenceX issue 863 says so of a trace); "
            "or give --trace"
        )
    return lines


def _sources(link: Link, load: ClosedLoop) -> list[str]:
    return sources(link.steps(load))


def _of(times: ServingTimes, quantity: str) -> Array:
    return {
        "tpot": times.tpot,
        "ttft": times.ttft_mean,  # as a client's mean, which `observe` reads
        "output_throughput": times.output,
        "decode_step": times.decode,
        "prefill": times.prefill,
    }[quantity]


def _breakdown(
    link: Link,
    load: ClosedLoop,
    changes: Sequence[KernelChange],
    alone: dict[str, tuple[ServingTimes, ServingTimes]],
    quantity: str,
) -> list[Part]:
    """Each source's interval of the change with all others held, widest first, without those that move
    nothing."""
    origins = {
        t.source: t.origin for p in (link.steps(load).decode, link.steps(load).prefill) for t in p.terms
    }
    calibrated: Origin = "calibration" if link.calibrated_with else "assumed"
    origins |= dict.fromkeys(("kappa", "step", "host", "cold"), calibrated)
    has_source = all(change.source for change in changes)
    origins["kernel change"] = "measured" if has_source else "assumed"
    parts = []
    for name, (before, after) in alone.items():
        difference = _of(after, quantity) - _of(before, quantity)
        low, high = interval(difference)
        if high - low > max(abs(float(difference[0])) * 1e-3, SMALL):
            value = float(difference[0])
            parts.append(
                Part(what=name, origin=origins.get(name, "assumed"), value=value, low=low, high=high)
            )
    return sorted(parts, key=lambda part: part.low - part.high)


def _tpot_parts(
    link: Link, load: ClosedLoop, changes: Sequence[KernelChange], before: ServingTimes, after: ServingTimes
) -> list[Part]:
    """-kappa * sum n w dt in the decode steps, the same in the stalls, and what the closure makes of it (the
    batch moves); they sum to the change of TPOT."""
    world = link.world()
    steps = link.steps(load)
    drawn = link.draws(load, world, link.fitted(world))
    parts, left = [], after.tpot - before.tpot
    for change in changes:
        old, new = applied(steps, drawn, [change], world)
        batch = np.maximum(before.batch, SMALL)
        decode = steps.decode_ms(new, batch) - steps.decode_ms(old, batch)
        single = np.ones_like(batch)
        per_prompt = before.stall / np.maximum(steps.prefill_ms(old, single), SMALL)
        stall = (steps.prefill_ms(new, single) - steps.prefill_ms(old, single)) * per_prompt
        name = f"{change.op}:{change.part}" if change.part else change.op
        origin = next(
            t.origin for _, phase, indices in phases(steps, change) for t in (phase.terms[indices[0]],)
        )
        for what, value in (("decode steps", decode), ("stalls by prefill", stall)):
            if abs(value[0]) > SMALL:
                parts.append(_part(f"{name}, {what}", origin, value))
                left = left - value
    parts.append(_part("closure: the batch and what comes together", "calibration", left))
    return parts


def _part(what: str, origin: Origin, draws: Array) -> Part:
    low, high = interval(draws)
    return Part(what=what, origin=origin, value=float(draws[0]), low=low, high=high)


def _shares(steps: StepTimes, draws: Draws, times: ServingTimes) -> list[Share]:
    """Of every term, the largest first, and of the gaps between steps."""
    zeros = np.zeros_like(times.batch)
    origins: dict[str, tuple[str, int]] = {}
    parts: dict[str, list[Array]] = {}
    for phase, factors, at, whole, kind in (
        (steps.decode, draws.decode, times.batch, times.decode, 0),
        (steps.prefill, draws.prefill, np.ones_like(times.batch), times.stall, 1),
    ):
        kappa = draws.kappa if kind else kappa_at(draws, at[:, None])[:, 0]
        taken = (factors.T * term_us(phase, draws.routing, at) * kappa / 1e3).T
        if kind:
            taken = taken * (whole / np.maximum(steps.prefill_ms(draws, at), SMALL))[:, None]
        rest = whole - taken.sum(axis=1)
        columns = [(t.name, t.origin, t.calls, taken[:, i]) for i, t in enumerate(phase.terms)]
        for name, origin, calls, ms in [*columns, ("host:gaps and scheduling", "assumed", 1, rest)]:
            origins[name] = (origins.get(name, (origin, 0))[0], max(origins.get(name, (origin, 0))[1], calls))
            row = parts.setdefault(name, [zeros, zeros])
            row[kind] = row[kind] + ms
    shares = [
        Share(
            name, *origins[name], float(decode[0]), float(stall[0]), Value.of((decode + stall) / times.tpot)
        )
        for name, (decode, stall) in parts.items()
    ]
    return sorted(shares, key=lambda share: -share.share.value)
