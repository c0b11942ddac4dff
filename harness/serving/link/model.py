"""The link model of a machine and engine: kernel times, structure, steps, closed loop and calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.errors import UsageError
from harness.serving.ledger.prediction import KernelChange
from harness.serving.link import calibration as calibrating
from harness.serving.link.calibration import PRIOR_SCATTER, Fit, MeasuredPoint, measured
from harness.serving.link.changes import applied
from harness.serving.link.closed_loop import Array, ClosedLoop, ServingTimes
from harness.serving.link.experts import BALANCED
from harness.serving.link.own_points import described, own_points
from harness.serving.link.step_times import MEMORY_SHARE, Draws, StepTimes, steps
from harness.serving.link.structure import Structure, structure
from harness.serving.link.times.assumed_times import ASSUMED_SCATTER, BASE, SOURCE, AssumedTables
from harness.serving.link.times.kernel_identity import OFF_BY, WIDER, OtherKernel, of_engine
from harness.serving.link.times.measured_times import MeasuredTimes
from harness.serving.link.times.tables import Tables, bundled, read_tables
from harness.serving.link.uncertainty import DRAWS, World
from harness.serving.names import data_sheet, engine_name, hardware_name
from shapes.attention import Parallel

SKEWED = "power_law_1.2"
CALIBRATED = (Parallel(tp=8), "bfloat16")  # what was measured: parallelism, cache
FAR = 5.0  # a factor between TPOT as measured and by the kernels' times; 4 is the most seen
CARRIED_OVER = 0.1  # deviation of kappa from one parallelism or cache to another


@dataclass(frozen=True)
class Link:
    """A model to predict with.

    calibration: points that set its constants; none: they are assumed
    kv:          dtype of its cache, bfloat16 or fp8
    calibrated_with: where they are from; calibrated_versions: of the engine that they are of
    unsaid:      what they do not say of the system
    like:        the model whose constants it takes where it has no points of its own
    exposure:    shares of op classes on the critical path, from a trace
    other_kernels: ops whose times are of another kernel than the engine runs; intervals are wider by that
    notes:       what was taken for granted, one line each
    """

    hardware: str
    engine: str
    structure: Structure
    skewed: Structure | None
    calibration: tuple[MeasuredPoint, ...] = ()
    calibrated_with: tuple[str, ...] = ()
    calibrated_versions: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    like: Link | None = None
    eager: bool = False
    kv: str = "bfloat16"
    exposure: Mapping[tuple[str, str], float] | None = None
    memory_gb: float | None = None
    other_kernels: tuple[OtherKernel, ...] = ()
    notes: tuple[str, ...] = ()
    kept: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gpus(self) -> int:
        return self.structure.parallel.tp * self.structure.parallel.dp

    def steps(self, load: ClosedLoop, eager: bool | None = None) -> StepTimes:
        """eager: as the link has it where not given."""
        eager = self.eager if eager is None else eager
        key = (self.structure, load, eager)
        if key not in self.kept:
            self.kept[key] = self._steps(load, eager)
        return self.kept[key]

    def _steps(self, load: ClosedLoop, eager: bool) -> StepTimes:
        memory = self.memory_gb
        times = steps(self.structure, load, skewed=self.skewed, memory_gb=memory, eager=eager)
        if times.capacity < 1:
            raise UsageError(
                f"no request of {load.mean_context:.0f} tokens fits: weights take "
                f"{self.structure.weights_gb:.1f} GB of each {self.hardware}'s {memory:.1f}"
            )
        return times

    def world(self, count: int = DRAWS, active: Sequence[str] | None = None) -> World:
        return World(count, None if active is None else frozenset(active), self.exposure or {}, self.engine)

    def fit(self, world: World) -> Fit:
        """The constants in each draw, without the scatter of single points."""
        fitted = self._fit(world)
        return replace(fitted, scatter=math.hypot(fitted.scatter, WIDER)) if self.other_kernels else fitted

    def _fit(self, world: World) -> Fit:
        if not self.calibration and self.like:
            fitted = self.like.fitted(world)
            return replace(fitted, scatter=math.hypot(fitted.scatter, CARRIED_OVER))
        if not self.calibration:
            return calibrating.assumed(np.ones(world.count))
        # The servers that were measured replayed graphs.
        prepared = [self.steps(point.load, eager=False) for point in self.calibration]
        scatter = math.hypot(PRIOR_SCATTER, ASSUMED_SCATTER * self.structure.assumed_share)
        return calibrating.fit(self.calibration, prepared, world.draws, scatter)

    def constants(self, world: World, fitted: Fit, scatter: Array | float = 0.0) -> dict[str, Array]:
        """As what was measured leaves them. scatter: of a point, in kappa's logarithm"""
        drawn_from = (
            ("kappa", "constant"),
            ("kappa", "slope"),
            ("step",),
            ("host", "constant"),
            ("cold", "constant"),
            ("cold", "prefill"),
        )
        return fitted.elsewhere(np.stack([world.normal(*name) for name in drawn_from]), scatter)

    def draws(self, load: ClosedLoop, world: World, fitted: Fit) -> Draws:
        """With the constants as they may be at a point that was not calibrated on."""
        scatter = fitted.scatter * world.student("kappa", fitted.freedom)
        drawn = world.draws(self.steps(load)).with_constants(**self.constants(world, fitted, scatter))
        ttft = np.exp(fitted.ttft_scatter * world.student("host", fitted.freedom))
        ttft_mean = np.exp(fitted.ttft_mean_scatter * world.student("cold", fitted.freedom))
        return replace(drawn, ttft=ttft, ttft_mean=ttft_mean)

    def serving(
        self, load: ClosedLoop, changes: Sequence[KernelChange] = (), world: World | None = None
    ) -> tuple[ServingTimes, ServingTimes]:
        """Before and after the changes, over the draws of the world."""
        world = world or self.world()
        drawn = self.draws(load, world, self.fitted(world))
        prepared = self.steps(load)
        before, after = applied(prepared, drawn, changes, world)
        return prepared.serving(before), prepared.serving(after) if changes else prepared.serving(before)

    def fitted(self, world: World) -> Fit:
        """`fit`, made once."""
        exposure = tuple(sorted(world.exposure.items()))
        key = (self.structure, self.calibration, world.count, world.active, exposure)
        if key not in self.kept:
            self.kept[key] = self.fit(world)
        return self.kept[key]

    def without(self, point: MeasuredPoint) -> Link:
        """Calibrated on all points but one."""
        return replace(self, calibration=tuple(p for p in self.calibration if p != point))


def _memory_gb(hardware: str) -> float | None:
    """Of a GPU, 1e9 bytes; None where there is no data sheet of it."""
    entry = data_sheet(hardware)
    return entry["memory_gib"] * 2**30 / 1e9 if "memory_gib" in entry else None


def _require_near(model: Link) -> None:
    """Raises UsageError for a point that no constant brings near what the kernels' times say."""
    alone = replace(model, calibration=(), like=None, eager=False)
    for point in model.calibration:
        expected = float(alone.serving(point.load, world=alone.world(1))[0].tpot[0])
        if not 1 / FAR < point.tpot_ms / expected < FAR:
            raise UsageError(
                f"a point of {point.load.isl} in, {point.load.osl} out, {point.load.concurrency} in flight "
                f"has a TPOT of {point.tpot_ms:g} ms, and its kernels' times make it {expected:.3g}: no "
                "constant brings them together; other units?"
            )


def _of_attention(tables: Tables, measured_times: MeasuredTimes | None) -> list[str]:
    """What times of attention hold of which there is no time of its own."""
    held = tables.held("decode")
    if not held or (measured_times and "mla_decode" in measured_times.ops()):
        return []
    bmms = [] if tables.rows.get("mla_bmm_perf") else [part for part in held if part in ("w_uk", "w_uv")]
    whole = f"{tables.where} times attention with {', '.join(held)}"
    stay = f", but {' and '.join(bmms)} have none and count as mla_decode" if bmms else ""
    return [f"{whole}: their own times are taken off{stay}"]


def _tables(hardware: str, engine: str, measured_times: MeasuredTimes | None, assumed: bool) -> Tables:
    """The tables of this project; empty ones beside own runs or where times are assumed, so that what they
    lack is named."""
    if folder := bundled().get((hardware, engine)):
        return read_tables(folder)
    if measured_times:
        return Tables(measured_times.device, engine, "", f"{measured_times.where}, without tables", {})
    if assumed:
        return Tables(hardware, engine, "", "no tables", {})
    known = ", ".join(" ".join(key) for key in bundled()) or "none"
    raise UsageError(
        f"no per-op times of {hardware} with {engine} here (there are: {known}); give --tables DIR, in "
        "AIConfigurator's files and columns and timed on that machine, and runs of this suite there (--runs) "
        "for what it measures: block_scale_gemm, fused_moe, mla_decode, mha_prefill; --assumed takes all "
        "from data sheets, with wide intervals"
    )


def link(
    hardware: str | None = None,
    engine: str | None = None,
    *,
    parallel: Parallel | None = None,
    kv: str = "bfloat16",
    eager: bool = False,
    tables: Tables | None = None,
    exposure: Mapping[tuple[str, str], float] | None = None,
    measured_times: MeasuredTimes | None = None,
    any_kernel: bool = False,
    assumed: bool = False,
    own: Sequence[str] = (),
    range_ratio: float = 0.8,
    prefill_tokens: int = 8192,
    recv_interval: int = 1,
) -> Link:
    """The model of a machine and engine; by default those of the tables, or H200 and SGLang.

    assumed: whether times that neither tables nor runs have are taken from data sheets
    own: files of serving results to calibrate on, in place of what is known here; range_ratio, prefill_tokens
    and recv_interval: of them, where they do not say
    any_kernel: also where the tables time another kernel than the engine runs, with wider intervals. Raises
    UsageError, one line, where it has no data for them, or those of others.
    """
    parallel = parallel or Parallel(tp=8)
    notes: list[str] = []
    hardware = hardware_name(hardware or (tables.device if tables else "h200"))
    engine = engine_name(engine or (tables.engine if tables else "sglang"))
    if engine == "trtllm" and data_sheet(hardware).get("arch", "").startswith("gfx"):
        raise UsageError(f"TensorRT-LLM does not run on {hardware}")
    tables = tables or _tables(hardware, engine, measured_times, assumed)
    for where, device in [
        (tables.where, tables.device),
        *([(measured_times.where, measured_times.device)] if measured_times else []),
    ]:
        if hardware_name(device) != hardware:
            raise UsageError(
                f"times in {where} are of {device}, not {hardware}: kernels of one machine are not linked to "
                f"serving of another; give --hardware {hardware_name(device)} and tables of that machine"
            )
    if engine_name(tables.engine) != engine:
        raise UsageError(
            f"times in {tables.where} are of kernels as {tables.engine} calls them, not {engine}: give "
            f"--engine {engine_name(tables.engine)}, or tables of {engine}"
        )
    tables, others = of_engine(tables, engine, hardware)
    notes += tables.notes
    if others and not any_kernel:
        raise UsageError(
            f"{tables.where}: {'; '.join(map(str, others))}: predictions from another kernel's times were "
            f"off by {OFF_BY:.0%}; give tables or --runs of the engine's, or --any-kernel for wide intervals"
        )
    notes += [f"{other}: intervals are wider by the {OFF_BY:.0%} that was once off" for other in others]
    fallback = AssumedTables.of(hardware, engine, read_tables(bundled()[BASE, "sglang"])) if assumed else None
    built = structure(tables, parallel, kv=kv, measured_times=measured_times, assumed=fallback)
    lacking = dict.fromkeys(t.op for t in (*built.decode, *built.prefill) if t.source == SOURCE)
    if lacking:
        notes.append(
            f"assumed: times of {', '.join(lacking)}, from the H200's tables by both machines' data sheets"
        )
        if fallback and (least := fallback.here.block_of_k_us) and "block_scale_gemm" in lacking:
            notes.append(
                f"FP8 products of {engine} on {hardware} take {least:g} us for each 128 of k at least, as in "
                "a trace of MI325X: faster ones are worth that much more here"
            )
    notes += _of_attention(tables, measured_times)
    if (timed := tables.timed_gpus(parallel.tp)) != parallel.tp:
        notes.append(f"no all-reduce over {parallel.tp} GPUs was timed: it is taken from that over {timed}")
    if (timed_routing := tables.distributions()) and BALANCED not in timed_routing:
        notes.append(f"no MoE times of {BALANCED} routing: those of {timed_routing[0]} stand for them")
    skewed = None
    if SKEWED in tables.distributions():
        skewed = structure(
            tables, parallel, kv=kv, routing=SKEWED, measured_times=measured_times, assumed=fallback
        )
    else:
        notes.append(f"no MoE times of skewed routing ({SKEWED}): what routing does is left out of intervals")
    if measured_times:
        ops = ", ".join(measured_times.ops())
        notes.append(f"measured in {measured_times.where}: {ops}, where near the step's sizes")
    memory_gb = _memory_gb(hardware)
    if memory_gb and built.weights_gb > memory_gb * MEMORY_SHARE:
        notes.insert(
            0,
            f"this does not fit: weights take {built.weights_gb:.1f} GB of each {hardware}'s "
            f"{memory_gb:.1f}; predicted as if they and the cache did",
        )
        memory_gb = None
    series = [s for s in measured(hardware, engine) if s.use == "calibration"]
    points = tuple(point for series_ in series for point in series_.points)
    versions = tuple(series_.version for series_ in series)
    runs: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    like = None
    if own:
        measured_points = own_points(
            own,
            hardware=hardware,
            engine=engine,
            parallel=parallel,
            kv=kv,
            range_ratio=range_ratio,
            prefill_tokens=prefill_tokens,
            recv_interval=recv_interval,
        )
        points, versions = measured_points.points, measured_points.versions
        runs, unsaid = measured_points.runs, measured_points.unsaid
        notes += described(points)
        if wrong := measured_points.wrong:
            notes.append(wrong)
        if unsaid:
            notes.append(f"the points do not say their {', '.join(unsaid)}: taken to be as given here")
    elif not points:
        notes.append(
            f"no serving of {hardware} with {engine} was measured to calibrate on: kappa is assumed "
            f"{calibrating.ASSUMED_KAPPA:g}, +- {calibrating.ASSUMED_DEVIATION:.0%}"
        )
    elif (parallel, kv) != CALIBRATED:
        points, like = (
            (),
            link(
                hardware,
                engine,
                tables=tables,
                exposure=exposure,
                measured_times=measured_times,
                any_kernel=any_kernel,
                assumed=assumed,
            ),
        )
        notes.append(
            f"calibrated at {CALIBRATED[0].text} with a {CALIBRATED[1]} cache; carried over to "
            f"{parallel.text}, {kv}, with {CARRIED_OVER:.0%} more of spread (assumed)"
        )
    notes += [
        f"calibrated with {engine} {version}; the tables are of {tables.version}"
        for version in filter(None, versions)
        if tables.version not in ("", version)
    ]
    model = Link(
        hardware,
        engine,
        built,
        skewed,
        points,
        runs or tuple(series_.source for series_ in series),
        versions,
        unsaid,
        like,
        eager,
        kv,
        exposure,
        memory_gb,
        tuple(others),
        tuple(dict.fromkeys(notes)),
    )
    if own:
        _require_near(model)
    return model
