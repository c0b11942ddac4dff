"""The model of a system: kernel times, structure and constants, ready to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.errors import UsageError
from harness.serving.link.calibration import PRIOR, Constants, Measured, Point, Served
from harness.serving.link.closed_loop import cold_share
from harness.serving.link.kernel_sums import MEMORY_SHARE, KernelSums, kernel_sums
from harness.serving.link.load import Load
from harness.serving.link.points import Series, own_points, require_plausible, stored_series
from harness.serving.link.structure import Structure, structure
from harness.serving.link.times.assumed_times import BASE, SOURCE, AssumedTables
from harness.serving.link.times.kernel_identity import of_engine
from harness.serving.link.times.measured_times import MeasuredTimes, read_measured_times
from harness.serving.link.times.table_files import table_files
from harness.serving.link.times.tables import FILES, Tables, bundled, read_tables
from harness.serving.names import data_sheet, engine_name, hardware_name, known_engine
from shapes.attention import Parallel

HARDWARE, ENGINE = "h200", "sglang"
"""By default."""


@dataclass(frozen=True, kw_only=True)
class System:
    """What a prediction is asked of.

    hardware, engine: empty: those of the tables, or h200 and sglang
    tp, ep:    tensor and expert parallelism; ep is 1 or tp
    kv:        dtype of the cache, bfloat16 or fp8
    times:     sets of AIConfigurator's tables, at most one, and runs of this suite; what they lack is this
               project's tables', or assumed
    calibrate: files of serving results of this server; none: others' points of that machine and engine
    warm:      whether the server has served before, so that its first wave is not cold
    """

    hardware: str = ""
    engine: str = ""
    tp: int = 8
    ep: int = 1
    kv: str = "bfloat16"
    times: tuple[str, ...] = ()
    calibrate: tuple[str, ...] = ()
    warm: bool = False

    @property
    def parallel(self) -> Parallel:
        """Raises UsageError where the two do not go together."""
        try:
            return Parallel(tp=self.tp, ep=self.ep)
        except ValueError as error:
            raise UsageError(str(error)) from None


@dataclass(frozen=True)
class Link:
    """A model to predict with.

    constants: fitted to own points, or begun at other systems'
    sources:   where the points are from, one line each; empty: none was of this machine and engine
    own:       whether they are the user's own
    notes:     what was taken for granted, one line each
    """

    system: System
    structure: Structure
    constants: Constants
    memory_gb: float | None = None
    sources: tuple[str, ...] = ()
    own: bool = False
    notes: tuple[str, ...] = ()
    kept: dict[Load, KernelSums] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gpus(self) -> int:
        return self.structure.parallel.tp

    def sums(self, load: Load) -> KernelSums:
        if load not in self.kept:
            self.kept[load] = kernel_sums(self.structure, load, self.memory_gb)
        return self.kept[load]

    def cold(self, load: Load) -> float:
        return cold_share(load, self.system.engine, self.system.warm)

    def served(self, load: Load) -> Served:
        return self.constants.served(self.sums(load), self.cold(load))

    def measured(self, points: Sequence[Point], warm: bool) -> list[Measured]:
        return [Measured(point, self.sums(point.load), self.system.engine, warm) for point in points]


def link(system: System | None = None) -> Link:
    """The model of a system. Raises UsageError, one line, where it has no times for it, or those of others,
    or points of others."""
    system, tables, runs = _times_of(system or System())
    model = uncalibrated(system, tables, runs)
    if system.calibrate:
        return _on_own_points(model, engine_given=bool(system.engine))
    same = [
        series
        for series in stored_series()
        if (series.hardware, series.engine, series.parallel)
        == (model.system.hardware, model.system.engine, model.structure.parallel)
    ]
    return on_others_points(model, [series for series in same if not series.left_out])


def on_others_points(model: Link, same: Sequence[Series], prior: Constants = PRIOR) -> Link:
    """With the constants of other operators' servers of that machine, engine and parallelism, which another
    one's differ from; or those of other systems where there are none."""
    measured = [each for series in same for each in model.measured(series.points, series.warm)]
    if not measured:
        where = f"{model.system.hardware} with {model.system.engine} at {model.structure.parallel.text}"
        note = (
            f"no serving of {where} is known: the constants are those of other systems, with wide intervals"
        )
        return replace(model, constants=prior, notes=(*model.notes, note))
    operators = dict.fromkeys(f"{each.operator} {each.version}".strip() for each in same)
    note = (
        f"constants from {len(measured)} points of others' servers ({', '.join(operators)}); how far operators of "
        "one system differ is in the intervals; --calibrate takes your own"
    )
    constants = prior.fitted(measured).elsewhere()
    sources = tuple(dict.fromkeys(each.source for each in same))
    return replace(model, constants=constants, sources=sources, notes=(*model.notes, note))


def _on_own_points(model: Link, engine_given: bool) -> Link:
    system = model.system
    own = own_points(
        system.calibrate,
        hardware=system.hardware,
        engine=system.engine,
        engine_given=engine_given,
        parallel=model.structure.parallel,
        kv=system.kv,
    )
    measured = model.measured(own.points, system.warm)
    for each in measured:
        require_plausible(each, model.served(each.point.load).tpot.value)
    version = model.structure.version
    notes = [
        f"calibrated with {system.engine} {seen}; the tables are of {version}"
        for seen in own.versions
        if version not in ("", seen)
    ]
    constants = PRIOR.fitted(measured)
    return replace(
        model,
        constants=constants,
        sources=system.calibrate,
        own=True,
        notes=(*model.notes, *own.notes, *notes),
    )


def uncalibrated(system: System, tables: Tables | None = None, runs: MeasuredTimes | None = None) -> Link:
    """With the constants of other systems."""
    hardware = hardware_name(system.hardware or (tables.device if tables else HARDWARE))
    engine = known_engine(system.engine or (tables.engine if tables else ENGINE))
    if engine == "trtllm" and data_sheet(hardware).get("arch", "").startswith("gfx"):
        raise UsageError(f"TensorRT-LLM does not run on {hardware}")
    if tables is None:
        folder = bundled().get((hardware, engine))
        tables = read_tables(folder) if folder else Tables(hardware, engine, "", "no tables", {})
    _require_same(hardware, engine, tables, runs)
    tables, others = of_engine(tables, engine, hardware)
    fallback = None
    if data_sheet(hardware):
        fallback = AssumedTables.of(hardware, engine, read_tables(bundled()[BASE, "sglang"]))
    elif others:
        raise UsageError(
            f"{tables.where}: {'; '.join(map(str, others))}; and there is no data sheet of {hardware} to assume "
            "its times by: give tables of that kernel"
        )
    built = structure(tables, system.parallel, kv=system.kv, measured_times=runs, assumed=fallback)
    memory_gb = _memory_gb(hardware)
    notes = [*tables.notes, *map(str, others), *_of_times(built, tables, fallback, runs)]
    if memory_gb and built.weights_gb > memory_gb * MEMORY_SHARE:
        notes.insert(
            0,
            f"this does not fit: weights take {built.weights_gb:.1f} GB of each {hardware}'s "
            f"{memory_gb:.1f}; predicted as if they and the cache did",
        )
        memory_gb = None
    resolved = replace(system, hardware=hardware, engine=engine)
    return Link(resolved, built, PRIOR, memory_gb, notes=tuple(dict.fromkeys(notes)))


def _times_of(system: System) -> tuple[System, Tables | None, MeasuredTimes | None]:
    """The tables and runs among a system's times."""
    tables = [path for path in system.times if _is_set(path)]
    runs = [path for path in system.times if path not in tables]
    if len(tables) > 1:
        raise UsageError(f"--times names more than one set of tables: {', '.join(tables)}; give one")
    return (
        system,
        read_tables(Path(tables[0])) if tables else None,
        read_measured_times(runs) if runs else None,
    )


def _is_set(path: str) -> bool:
    """Whether it is a set of tables, and no run of this suite."""
    try:
        return bool(table_files(Path(path), FILES))
    except UsageError:
        return False


def _require_same(hardware: str, engine: str, tables: Tables, runs: MeasuredTimes | None) -> None:
    """Raises UsageError for times of another machine or engine."""
    places = [(tables.where, tables.device), *([(runs.where, runs.device)] if runs else [])]
    for where, device in places:
        if hardware_name(device) != hardware:
            raise UsageError(
                f"times in {where} are of {device}, not {hardware}: kernels of one machine are not linked to "
                f"serving of another; give --hardware {hardware_name(device)}, or times of {hardware}"
            )
    if engine_name(tables.engine) != engine:
        raise UsageError(
            f"times in {tables.where} are of kernels as {tables.engine} calls them, not {engine}: give "
            f"--engine {engine_name(tables.engine)}, or tables of {engine}"
        )


def _memory_gb(hardware: str) -> float | None:
    """Of a GPU, 1e9 bytes; None where there is no data sheet of it."""
    entry = data_sheet(hardware)
    return entry["memory_gib"] * 2**30 / 1e9 if "memory_gib" in entry else None


def _of_times(
    built: Structure, tables: Tables, fallback: AssumedTables | None, runs: MeasuredTimes | None
) -> list[str]:
    """What is to be known of the kernels' times, one line each."""
    notes = []
    if lacking := dict.fromkeys(t.op for t in (*built.decode, *built.prefill) if t.source == SOURCE):
        notes.append(
            f"assumed: times of {', '.join(lacking)}, from the H200's tables by both machines' data sheets"
        )
    if fallback and (least := fallback.here.block_of_k_us) and "block_scale_gemm" in lacking:
        notes.append(
            f"FP8 products of {tables.engine} on {tables.device} take {least:g} us for each 128 of k at least, as "
            "in a trace of MI325X: faster ones are worth that much more here"
        )
    notes += _of_attention(tables, runs)
    tp = built.parallel.tp
    if (timed := tables.timed_gpus(tp)) != tp:
        notes.append(f"no all-reduce over {tp} GPUs was timed: it is taken from that over {timed}")
    if runs:
        notes.append(f"measured in {runs.where}: {', '.join(runs.ops())}, where near the step's sizes")
    return notes


def _of_attention(tables: Tables, runs: MeasuredTimes | None) -> list[str]:
    """What times of attention hold of which there is no time of its own."""
    held = tables.held("decode")
    if not held or (runs and "mla_decode" in runs.ops()):
        return []
    bmms = [] if tables.rows.get("mla_bmm_perf") else [part for part in held if part in ("w_uk", "w_uv")]
    whole = f"{tables.where} times attention with {', '.join(held)}"
    stay = f", but {' and '.join(bmms)} have none and count as mla_decode" if bmms else ""
    return [f"{whole}: their own times are taken off{stay}"]
