"""The link: kernel times, structure, step, closure and calibration as one model of a machine and an engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.errors import UsageError
from harness.serving.link import calibration as calibrating
from harness.serving.link.calibration import Fit, Point, Series, measured
from harness.serving.link.changes import applied
from harness.serving.link.closure import Serving, Workload
from harness.serving.link.own import Own
from harness.serving.link.step import Draws, Steps, steps
from harness.serving.link.structure import Structure, structure
from harness.serving.link.tables import Tables, bundled, read_tables
from harness.serving.link.uncertainty import DRAWS, World
from harness.serving.prediction import KernelChange
from shapes.attention import Parallel

SKEWED = "power_law_1.2"
MEMORY_GB = {"h200": 150.0}  # what the driver gives, 1e9 bytes


@dataclass(frozen=True)
class Link:
    """A model to predict with.

    calibration: points that set its constants; none: they are assumed
    exposure:    shares of op classes on the critical path, from a trace
    notes:       what was taken for granted, one line each
    """

    hardware: str
    engine: str
    structure: Structure
    skewed: Structure | None
    calibration: tuple[Point, ...] = ()
    calibrated_with: str = ""
    eager: bool = False
    exposure: Mapping[tuple[str, str], float] | None = None
    memory_gb: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return self.structure.parallel.tp * self.structure.parallel.dp

    def steps(self, load: Workload) -> Steps:
        key = (id(self.structure), load, self.eager)
        if key not in _STEPS:
            _STEPS[key] = (self, self._steps(load, self.eager))  # the link stays alive with its key
        return _STEPS[key][1]

    def _steps(self, load: Workload, eager: bool) -> Steps:
        memory = self.memory_gb
        found = steps(self.structure, load, skewed=self.skewed, memory_gb=memory, eager=eager)
        if found.capacity < 1:
            raise UsageError(
                f"no request of {load.mean_context:.0f} tokens fits: weights take "
                f"{self.structure.weights_gb:.1f} GB of each {self.hardware}'s {memory:g}"
            )
        return found

    def world(self, count: int = DRAWS, active: Sequence[str] | None = None) -> World:
        return World(count, None if active is None else frozenset(active), self.exposure or {})

    def fit(self, world: World) -> Fit:
        """The constants in each draw, without the scatter of single points."""
        if not self.calibration:
            return calibrating.assumed(np.ones(world.count))
        prepared = [self._calibration_steps(point.load) for point in self.calibration]
        return calibrating.fit(self.calibration, prepared, world.draws, self.calibrated_with)

    def _calibration_steps(self, load: Workload) -> Steps:
        """Servers that calibrated replayed graphs."""
        key = (id(self.structure), load, False)
        if key not in _STEPS:
            _STEPS[key] = (self, self._steps(load, False))
        return _STEPS[key][1]

    def draws(self, load: Workload, world: World, fitted: Fit) -> Draws:
        """With kappa as it may be at a point that was not calibrated on."""
        points = len(fitted.residuals)
        spread = fitted.scatter * (1 + 1 / points) ** 0.5 if points else fitted.scatter
        kappa = fitted.kappa * np.exp(spread * world.student("kappa", points - 1))
        return replace(world.draws(self.steps(load)), kappa=kappa, host_ms=fitted.host_ms)

    def serving(
        self, load: Workload, changes: Sequence[KernelChange] = (), world: World | None = None
    ) -> tuple[Serving, Serving]:
        """Before and after the changes, over the draws of the world."""
        world = world or self.world()
        drawn = self.draws(load, world, self.fitted(world))
        prepared = self.steps(load)
        before, after = applied(prepared, drawn, changes, world)
        return prepared.serving(before), prepared.serving(after) if changes else prepared.serving(before)

    def fitted(self, world: World) -> Fit:
        key = (id(self.structure), self.calibration, world.count, world.active, self.eager,
               tuple(sorted(world.exposure.items())))  # fmt: skip
        if key not in _FITS:
            _FITS[key] = (self, self.fit(world))
        return _FITS[key][1]

    def without(self, point: Point) -> Link:
        """Calibrated on all points but one."""
        return replace(self, calibration=tuple(p for p in self.calibration if p != point))


_STEPS: dict = {}
_FITS: dict = {}


def link(
    hardware: str = "h200",
    engine: str = "sglang",
    *,
    parallel: Parallel | None = None,
    kv: str = "bfloat16",
    eager: bool = False,
    tables: Tables | None = None,
    exposure: Mapping[tuple[str, str], float] | None = None,
    own: Own | None = None,
) -> Link:
    """The model of a machine and engine. Raises UsageError, one line, where it has no data for them."""
    parallel = parallel or Parallel(tp=8)
    notes = []
    if tables is None:
        folder = bundled().get((hardware, engine))
        if folder is None:
            known = ", ".join(" ".join(key) for key in bundled()) or "none"
            raise UsageError(
                f"no per-op times of {hardware} with {engine} here (there are: {known}); give --tables DIR, "
                "files in AIConfigurator's columns timed on that machine, or its own runs with --runs RUN"
            )
        tables = read_tables(folder)
    for where, device in [(tables.where, tables.device), *([(own.where, own.device)] if own else [])]:
        if hardware.lower() not in device.lower():
            raise UsageError(
                f"times in {where} are of {device}, not {hardware}: kernels of one machine are not linked to "
                f"serving of another; give --hardware {device.split()[-1].lower()} with tables of that machine"
            )
    built = structure(tables, parallel, kv=kv, own=own)
    skewed = None
    if SKEWED in tables.distributions():
        skewed = structure(tables, parallel, kv=kv, routing=SKEWED, own=own)
    else:
        notes.append(f"no MoE times of skewed routing ({SKEWED}): what routing does is left out of intervals")
    if own:
        notes.append(f"measured in {own.where}: {', '.join(own.ops())}, where near the step's sizes")
    series = [s for s in measured(hardware, engine) if s.use == "calibration"]
    comparable = parallel == Parallel(tp=8) and kv == "bfloat16"
    points, source = _points(series) if comparable else ((), "")
    if not points:
        notes.append(
            f"no serving of {hardware} {engine} {parallel.text} {kv} was measured to calibrate on: kappa is "
            f"assumed {calibrating.ASSUMED_KAPPA:g}, +- {calibrating.ASSUMED_DEVIATION:.0%}"
        )
    return Link(
        hardware, engine, built, skewed, points, source, eager, exposure, MEMORY_GB.get(hardware), tuple(notes)
    )


def _points(series: Sequence[Series]) -> tuple[tuple[Point, ...], str]:
    return tuple(p for s in series for p in s.points), "; ".join(s.source for s in series)


@functools.cache
def standard() -> Link:
    """H200, SGLang, TP8."""
    return link()
