"""Measured points: the stored series of public servers, and a user's own results of any client."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import PUBLISHED
from harness.serving.clients.load import load
from harness.serving.compare.identity import UNKNOWN, Setting, differences, length, text, with_engine
from harness.serving.link.calibration import Measured, Point
from harness.serving.link.load import PREFILL_TOKENS, Load
from harness.serving.names import model_name
from harness.serving.schema import Finding, Parallelism, ServingRun
from shapes.attention import Parallel

STORED = PUBLISHED / "serving-link"
RANGE_RATIO = 0.8
"""Of lengths, where nothing says it: InferenceX's."""
SAME_LAYERS = re.compile(r"deepseek-(r1|v3|v3\.1)(-base|-\d{4}|-terminus)?")
"""Models of DeepSeek-R1's layers and sizes; not the distilled ones, nor V3.2's sparse attention."""
CACHED = 0.4
"""A TTFT below this share of what the prompt's prefill kernels take is of prompts found in a cache."""
FAR = 5.0
"""A factor between TPOT as measured and by the kernels' times; 4 is the most seen."""


@dataclass(frozen=True)
class Series:
    """What one operator measured of one system at one pair of lengths, from results/published/serving-link.

    operator: whose server it was, with what tells it from another of the same operator
    kv:       dtype of the cache; warm: whether the server had served before
    left_out: why it counts in no total and teaches nothing; empty: it does
    """

    name: str
    hardware: str
    engine: str
    version: str
    operator: str
    parallel: Parallel
    kv: str
    warm: bool
    left_out: str
    source: str
    points: tuple[Point, ...]

    @property
    def system(self) -> str:
        return f"{self.hardware} {self.engine}"

    @property
    def server(self) -> str:
        return f"{self.system} {self.operator} {self.parallel.text}"


@functools.cache
def stored_series(folder: Path = STORED) -> tuple[Series, ...]:
    """All of them. Raises UsageError for a file that cannot be read."""
    found: list[Series] = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            found += [_series(document, entry) for entry in document["series"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"cannot read {path}: {type(error).__name__}: {error}") from None
    return tuple(found)


def _series(document: JsonObject, entry: JsonObject) -> Series:
    named = ("isl", "osl", "range_ratio", "prefill_tokens", "waves", "recv_interval", "concurrency")
    points = []
    for point in entry["points"]:
        of_load = {name: value for name, value in {**entry, **point}.items() if name in named}
        values = {name: point.get(name) for name in Point.__dataclass_fields__ if name != "load"}
        points.append(Point(Load(**of_load), **values))
    return Series(
        name=entry["name"],
        hardware=document["hardware"],
        engine=document["engine"],
        version=entry["version"],
        operator=entry["operator"],
        parallel=Parallel(tp=entry.get("tp", 8), ep=entry.get("ep", 1)),
        kv=str(entry.get("kv") or document["kv"]),
        warm=entry.get("warm", False),
        left_out=entry.get("left_out", ""),
        source=entry["source"],
        points=tuple(points),
    )


def own_points(
    files: Sequence[str], *, hardware: str, engine: str, engine_given: bool, parallel: Parallel, kv: str
) -> tuple[tuple[Point, ...], list[str]]:
    """Of all runs in the files, and what is to be known of them, a line each.

    engine_given: whether the user said the engine; then it goes before what a file calls it. Raises
    UsageError for another system's run, for one with failed requests, or without closed loop, lengths, TPOT
    or TTFT, or with TTFTs that nobody measured.
    """
    runs = [run for name in files for run in load(name)]
    if not runs:
        raise UsageError(f"no run in {', '.join(files)} to calibrate on")
    if engine_given:
        runs = [with_engine(run, engine) for run in runs]
    notes = [f"{run.id}: {note}" for run in runs for note in run.notes if note.startswith("--engine")]
    notes += [f"{run.id}: {found.message}" for run in runs for found in _doubts(run)]
    unsaid: dict[str, None] = {}
    for run in runs:
        setting = Setting(
            hardware=hardware,
            gpus=parallel.tp * parallel.dp,
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
        if unlike:
            hint = (
                "; --engine says it where a file is wrong" if any(d.name == "engine" for d in unlike) else ""
            )
            raise UsageError(f"{run.id} does not calibrate this: {text(unlike)}{hint}")
        unsaid |= dict.fromkeys(d.name for d in differences(setting, run) if d.run == UNKNOWN)
        unsaid |= dict.fromkeys(["range of lengths"] if _range(run) is None else [])
        unsaid |= dict.fromkeys([] if _count(run, "chunked-prefill-size") else ["tokens of a prefill step"])
    points = tuple(dict.fromkeys(map(_point, runs)))
    of_lengths: dict[str, list[int]] = {}
    for point in points:
        of_lengths.setdefault(f"{point.load.isl} in, {point.load.osl} out", []).append(point.load.concurrency)
    notes += [
        f"calibrated on {len(c)} at {lengths}: {sorted(c)} in flight" for lengths, c in of_lengths.items()
    ]
    if unsaid:
        notes.append(f"the points do not say their {', '.join(unsaid)}: taken to be as given here")
    return points, notes


def _doubts(run: ServingRun) -> list[Finding]:
    """What `serving load` finds wrong or suspect in a run.

    Raises UsageError where its prompts were found in a cache.
    """
    for found in run.findings:
        if found.rule == "prefix_cache":
            raise UsageError(f"{run.id} cannot calibrate: {found.message}")
    return [found for found in run.findings if found.severity != "note"]


def _range(run: ServingRun) -> float | None:
    """The shortest length over the longest, as the run says it or as its mean tells; None: neither does."""
    load = run.workload
    if load.range_ratio is None and load.output_len and load.longest_output_len:
        return max(round(2 * load.output_len / load.longest_output_len - 1, 2), 0.0)
    return load.range_ratio


def _count(run: ServingRun, option: str) -> int:
    """A number among the server's options; 0 where it is not said, or none."""
    said = run.option(option)
    return int(said) if said.isdigit() else 0


def _point(run: ServingRun) -> Point:
    ratio = _range(run)
    ratio = RANGE_RATIO if ratio is None else ratio
    if not 0 <= ratio <= 1:
        raise UsageError(
            f"{run.id} has a range of lengths of {ratio:g}, not from 0 to 1: it cannot calibrate"
        )
    asked, to_longest = run.workload, 2 / (1 + ratio)
    wanted = {
        "input length": (length(run, "input") or 0) * to_longest or asked.longest_input_len,
        "output length": (length(run, "output") or 0) * to_longest or asked.longest_output_len,
        "concurrency": asked.concurrency,
        "mean TPOT": run.value("tpot", "mean"),
        "mean TTFT": run.value("ttft", "mean"),
    }
    if lacks := [name for name, value in wanted.items() if not value]:
        why = "".join(f"; {found.message}" for found in _doubts(run)[:1])
        raise UsageError(f"{run.id} does not say its {', '.join(lacks)}: it cannot calibrate{why}")
    isl, osl, concurrency, tpot, ttft = (float(value or 0) for value in wanted.values())
    of_run = Load(
        round(isl),
        round(osl),
        concurrency=round(concurrency),
        range_ratio=ratio,
        prefill_tokens=_count(run, "chunked-prefill-size") or PREFILL_TOKENS,
        waves=max(1, round((asked.num_prompts or 10 * concurrency) / concurrency)),
        recv_interval=_count(run, "scheduler-recv-interval") or 1,
    )
    return Point(of_run, tpot, ttft, run.value("ttft", "median") or None)


def require_plausible(measured: Measured, expected_tpot_ms: float) -> None:
    """Raises UsageError for a point that is of something else than what it calls itself."""
    point = measured.point
    load = point.load
    where = f"a point of {load.isl} in, {load.osl} out, {load.concurrency} in flight"
    if not 1 / FAR < point.tpot_ms / expected_tpot_ms < FAR:
        raise UsageError(
            f"{where} has a TPOT of {point.tpot_ms:g} ms, and its kernels' times make it "
            f"{expected_tpot_ms:.3g}: no constant brings them together; other units?"
        )
    ttft, prefill = point.ttft_median_ms or point.ttft_ms or math.inf, measured.sums.prefill.ms(1)
    if ttft < CACHED * prefill:
        raise UsageError(
            f"{where} has a TTFT of {ttft:.3g} ms, and the kernels of one prefill take {prefill:.3g}: its "
            "prompts were found in a cache (prefix caching); flush it, or take prompts of another seed"
        )
