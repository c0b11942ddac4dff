"""The model of a system: kernel times, structure and constants, ready to predict.

model = link(System(hardware="h200", engine="sglang", calibrate=("c4.json", "c64.json")))
model.served(Load(8192, 1024, concurrency=32)).tpot
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.errors import UsageError
from harness.serving.compare.identity import Setting
from harness.serving.link.calibration import PRIOR, Constants, Measured, Point, Served
from harness.serving.link.closed_loop import cold_share
from harness.serving.link.load import MEMORY_SHARE, KernelSums, Load, kernel_sums
from harness.serving.link.points import own_points, require_plausible
from harness.serving.link.structure import Structure, structure
from harness.serving.link.times.assumed_times import BASE, AssumedTables
from harness.serving.link.times.kernel_identity import of_engine
from harness.serving.link.times.measured_times import MeasuredTimes, read_measured_times
from harness.serving.link.times.table_files import table_files
from harness.serving.link.times.tables import FILES, Tables, bundled, read_tables
from harness.serving.names import data_sheet, engine_name, hardware_name, known_engine
from harness.serving.schema import Parallelism
from shapes.attention import Parallel

HARDWARE, ENGINE = "h200", "sglang"
"""By default."""


@dataclass(frozen=True, kw_only=True)
class System:
    """What a prediction is asked of.

    hardware, engine: empty: those of the tables, or h200 and sglang
    tp, ep:    tensor and expert parallelism; ep is 1 or tp
    kv:        dtype of the cache, bfloat16 or fp8
    times:     paths: a set of AIConfigurator's tables, and runs of this suite, which come first; what they
               lack is this project's, or assumed from data sheets
    calibrate: files of serving results of this server; none: the constants are those of other systems
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


@dataclass(frozen=True)
class Link:
    """A model to predict with.

    system:          with its hardware and engine named
    constants:       fitted to own points, or those of other systems
    calibrated_with: the files of the points; empty: none
    notes:           what was taken for granted, one line each
    """

    system: System
    structure: Structure
    constants: Constants = PRIOR
    memory_gb: float | None = None
    calibrated_with: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kept: dict[Load, KernelSums] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gpus(self) -> int:
        return self.structure.parallel.tp

    @property
    def in_server(self) -> dict[str, float]:
        """By phase, what kernels' times are multiplied with in the server: in decode steps, in stalls."""
        return dict(zip(("decode", "prefill"), map(float, self.constants.tpot.mean[1:]), strict=True))

    @property
    def setting(self) -> Setting:
        """The identity of the system, without a load."""
        parallel = self.structure.parallel
        return Setting(
            hardware=self.system.hardware,
            gpus=self.gpus,
            engine=self.system.engine,
            model="DeepSeek-R1",
            precision="fp8 block-scale",
            kv_cache=self.system.kv,
            plain=True,
            launch="graph",
            parallelism=Parallelism(tp=parallel.tp, pp=1, ep=parallel.ep, dp=parallel.dp),
            note=parallel.text,
        )

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
    system = system or System()
    sets = [path for path in system.times if _is_set(path)]
    runs = [path for path in system.times if path not in sets]
    if len(sets) > 1:
        raise UsageError(f"--times names more than one set of tables: {', '.join(sets)}; give one")
    tables = read_tables(Path(sets[0])) if sets else None
    model = uncalibrated(system, tables, read_measured_times(runs) if runs else None)
    if not system.calibrate:
        note = "not calibrated: the constants are those of other servers; --calibrate takes results of yours"
        return replace(model, notes=(*model.notes, note))
    points, notes = own_points(system.calibrate, model.setting, engine_given=bool(system.engine))
    measured = model.measured(points, system.warm)
    for each in measured:
        require_plausible(each, model.served(each.point.load).tpot.value)
    constants, known = PRIOR.fitted(measured), (*model.notes, *notes)
    return replace(model, constants=constants, calibrated_with=system.calibrate, notes=known)


def _is_set(path: str) -> bool:
    """Whether it is a set of tables, and no run of this suite."""
    try:
        return bool(table_files(Path(path), FILES))
    except UsageError:
        return False


def uncalibrated(system: System, tables: Tables | None = None, runs: MeasuredTimes | None = None) -> Link:
    """With the constants of other systems."""
    hardware = hardware_name(system.hardware or (tables.device if tables else HARDWARE))
    engine = known_engine(system.engine or (tables.engine if tables else ENGINE))
    if engine == "trtllm" and data_sheet(hardware).get("arch", "").startswith("gfx"):
        raise UsageError(f"TensorRT-LLM does not run on {hardware}")
    try:
        parallel = Parallel(tp=system.tp, ep=system.ep)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if tables is None:
        folder = bundled().get((hardware, engine))
        tables = read_tables(folder) if folder else Tables(hardware, engine, "", "no tables of its own", {})
    _require_same(hardware, engine, tables, runs)
    tables, fallback = of_engine(tables, engine, hardware), None
    if data_sheet(hardware):
        fallback = AssumedTables.of(hardware, engine, read_tables(bundled()[BASE, "sglang"]))
    built = structure(tables, parallel, kv=system.kv, measured_times=runs, assumed=fallback)
    memory_gb = data_sheet(hardware).get("memory_gib", 0.0) * 2**30 / 1e9
    notes = [*tables.notes, *_of_times(built, runs)]
    if memory_gb and built.weights_gb > memory_gb * MEMORY_SHARE:
        fits_not = f"weights take {built.weights_gb:.1f} GB of each {hardware}'s {memory_gb:.1f}"
        notes.insert(0, f"this does not fit: {fits_not}; predicted as if they and the cache did")
        memory_gb = 0.0
    resolved = replace(system, hardware=hardware, engine=engine)
    return Link(resolved, built, memory_gb=memory_gb or None, notes=tuple(dict.fromkeys(notes)))


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


def _of_times(built: Structure, runs: MeasuredTimes | None) -> list[str]:
    """What is to be known of the kernels' times, one line each."""
    notes = []
    if built.assumed:
        notes.append(f"assumed from data sheets and the H200's tables: times of {', '.join(built.assumed)}")
    if runs:
        notes.append(f"measured in {runs.where}: {', '.join(runs.ops())}, where near the step's sizes")
    return notes
