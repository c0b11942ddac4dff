"""Points to calibrate on from anybody's results: what any client wrote of runs on this system."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.compare.identity import UNKNOWN, Setting, differences, length, text
from harness.serving.compare.quantity import Quantity, of_instance
from harness.serving.link.calibration import MeasuredPoint
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.stored_calibration import System, stored
from harness.serving.names import model_name
from harness.serving.schema import Metric, Parallelism, ServingRun, contradictions, option
from shapes.attention import Parallel

SAME_LAYERS = re.compile(r"deepseek-(r1|v3|v3\.1)(-base|-\d{4}|-terminus)?")
"""Models of DeepSeek-R1's layers and sizes; not the distilled ones, nor V3.2's sparse attention."""


@dataclass(frozen=True)
class OwnPoints:
    """runs: the files of results, those of stored calibrations in place of these; unsaid: names of what some
    runs do not say of the system, which is taken to be as given; versions: of the engine, empty where a run
    does not say it; wrong: which of the runs' numbers cannot hold"""

    points: tuple[MeasuredPoint, ...]
    runs: tuple[str, ...]
    unsaid: tuple[str, ...]
    versions: tuple[str, ...]
    wrong: str


def own_points(
    files: Sequence[str],
    *,
    hardware: str,
    engine: str,
    parallel: Parallel,
    kv: str,
    range_ratio: float,
    prefill_tokens: int,
    recv_interval: int,
) -> OwnPoints:
    """Those of all runs and of all stored calibrations in the files.

    range_ratio, prefill_tokens, recv_interval: where a run does not say them. Raises UsageError for another
    system's, for a run with failed requests, or without closed loop, lengths, TPOT, TTFT or throughput.
    """
    asked = System(hardware=hardware, engine=engine, tp=parallel.tp, ep=parallel.ep, dp=parallel.dp, kv=kv)
    kept = {name: stored(Path(name), asked) for name in files}
    calibrations = [calibration for calibration in kept.values() if calibration]
    points = [point for calibration in calibrations for point in calibration.points]
    versions = dict.fromkeys(calibration.calibration_of.version for calibration in calibrations)
    unsaid = dict.fromkeys(name for calibration in calibrations for name in calibration.unsaid)
    sources = dict.fromkeys(run for calibration in calibrations for run in calibration.runs)
    results = [name for name in files if not kept[name]]
    runs = [run for name in results for run in load(name)]
    gpus = parallel.tp * parallel.dp
    for run in runs:
        setting = Setting(
            hardware=hardware,
            gpus=gpus,
            engine=engine,
            model=run.model if SAME_LAYERS.fullmatch(model_name(run.model)) else "DeepSeek-R1",
            precision="fp8 block-scale",
            kv_cache=kv,
            plain=True,
            launch="graph",
            parallelism=Parallelism(tp=parallel.tp, ep=parallel.ep, dp=parallel.dp),
            workload=run.workload.model_copy(update={"request_rate": 0.0, "ramp_up": ""}),
        )
        # The load is the run's own, and lengths are as served.
        unlike = [d for d in differences(setting, run, ["all"]) if not d.name.endswith("length")]
        unsaid |= dict.fromkeys(d.name for d in differences(setting, run) if d.run == UNKNOWN)
        if _range(run) is None:
            unsaid["range of lengths"] = None
        if _step_tokens(run) is None:
            unsaid["tokens of a prefill step"] = None
        if unlike:
            raise UsageError(f"{run.id} does not calibrate this: {text(unlike)}")
    points += [_point(run, gpus, range_ratio, prefill_tokens, recv_interval) for run in runs]
    if not points:
        raise UsageError(f"no run in {', '.join(files)} to calibrate on")
    return OwnPoints(
        tuple(dict.fromkeys(points)),
        tuple(sources | dict.fromkeys(results)),
        tuple(unsaid),
        tuple(versions | dict.fromkeys(run.version for run in runs)),
        contradictions(runs),
    )


def _range(run: ServingRun) -> float | None:
    """The shortest length over the longest, as the run says it or as its mean tells; None: neither does."""
    load = run.workload
    if load.range_ratio is None and load.output_len and load.longest_output_len:
        return max(round(2 * load.output_len / load.longest_output_len - 1, 2), 0.0)
    return load.range_ratio


def _step_tokens(run: ServingRun) -> int | None:
    """Of a step that prefills, at most; None: the run does not say it, or that prompts are not cut."""
    tokens = option(run.flags, "--chunked-prefill-size")
    return int(tokens) if tokens.isdigit() and int(tokens) else None


def _point(
    run: ServingRun, gpus: int, range_ratio: float, prefill_tokens: int, recv_interval: int
) -> MeasuredPoint:
    ratio = _range(run)
    ratio = range_ratio if ratio is None else ratio
    if not 0 <= ratio <= 1:
        raise UsageError(
            f"{run.id} has a range of lengths of {ratio:g}, not from 0 to 1: it cannot calibrate"
        )
    output = run.metric("throughput", "total", "output") or Metric(name="throughput", value=0, unit="tok/s")
    quantity = Quantity(run.model_copy(update={"gpus": gpus}), output)
    load, to_longest = run.workload, 2 / (1 + ratio)
    wanted = {
        "input length": (length(run, "input") or 0) * to_longest or load.longest_input_len,
        "output length": (length(run, "output") or 0) * to_longest or load.longest_output_len,
        "concurrency": load.concurrency,
        "mean TPOT": run.value("tpot", "mean"),
        "mean TTFT": run.value("ttft", "mean"),
        "output throughput": of_instance(quantity),
    }
    if lacks := [name for name, value in wanted.items() if not value]:
        raise UsageError(f"{run.id} does not say its {', '.join(lacks)}: it cannot calibrate")
    isl, osl, concurrency, tpot, ttft, tokens = (float(value or 0) for value in wanted.values())
    interval = option(run.flags, "--scheduler-recv-interval")
    prompts = load.num_prompts or 10 * concurrency
    return MeasuredPoint(
        ClosedLoop(
            round(isl),
            round(osl),
            concurrency=round(concurrency),
            range_ratio=ratio,
            prefill_tokens=_step_tokens(run) or prefill_tokens,
            waves=max(1, round(prompts / concurrency)),
            recv_interval=int(interval) if interval.isdigit() and int(interval) else recv_interval,
        ),
        tpot_ms=tpot,
        ttft_ms=ttft,
        output_tok_s_gpu=tokens / gpus,
        ttft_median_ms=run.value("ttft", "median") or None,
        ttft_p99_ms=run.value("ttft", "p99"),
    )


def described(points: Sequence[MeasuredPoint]) -> Iterator[str]:
    """A line for each pair of lengths: how many points, at which concurrencies."""
    by_length: dict[tuple[int, int], list[int]] = {}
    for point in points:
        by_length.setdefault((point.load.isl, point.load.osl), []).append(point.load.concurrency)
    for (isl, osl), counts in by_length.items():
        many = "1 own point" if len(counts) == 1 else f"{len(counts)} own points"
        yield f"calibrated on {many}: {isl} in, {osl} out, {sorted(counts)} in flight"
