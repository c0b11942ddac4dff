"""Validation against all stored series: error, coverage and width of the intervals.

A server is one operator's, of one machine, engine and parallelism. Each is predicted with constants that were
learnt from all other machines and engines, in three ways: uncalibrated; calibrated on two of its points,
those of the fewest and the most requests in flight at its shortest lengths; and calibrated on all of these up
to CALIBRATED in flight. Points on which it was calibrated are not predicted. So no point has set a constant
that predicts it, except some kernel times of gfx942, which are MI325X's (kernel_times.py). Servers with
drafts teach no constants.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import PUBLISHED
from harness.serving.link.calibration import Constants, Measured, Point, Value, learnt_constants
from harness.serving.link.load import Load
from harness.serving.link.model import Link, System, uncalibrated, unsureness
from harness.serving.names import engine_name, hardware_name
from shapes.attention import Parallel

STORED = PUBLISHED / "serving-link"
UNCALIBRATED, ON_TWO, ON_ALL = MODES = ("uncalibrated", "calibrated on two", "calibrated on the shortest")
QUANTITIES = ("TPOT", "mean TTFT", "throughput")
CALIBRATED = 64
ALLOWED, ALLOWED_DRAFTS, INSIDE = 0.07, 0.1, 0.85
"""What the documents promise: the mean error of TPOT after calibration, that on two points with drafts, and
the share of points in their 90 % intervals."""


@dataclass(frozen=True)
class Series:
    """What one operator measured of one system at one pair of lengths.

    operator: whose server it was, and which of its servers
    left_out: why it is in no total and teaches no constants; empty: it does both
    """

    name: str
    operator: str
    system: System
    left_out: str
    points: tuple[Point, ...]

    @property
    def kind(self) -> str:
        """The machine and the engine."""
        return f"{self.system.hardware} {self.system.engine}"

    @property
    def server(self) -> str:
        mtp = f" mtp{self.system.drafts}" if self.system.drafts else ""
        return f"{self.kind} {self.operator} {Parallel(tp=self.system.tp, ep=self.system.ep).text}{mtp}"


@functools.cache
def stored_series() -> tuple[Series, ...]:
    """All series in results/published/serving-link."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(STORED.glob("*.json"))]
    return tuple(_series(document, entry) for document in documents for entry in document["series"])


def _series(document: JsonObject, entry: JsonObject) -> Series:
    given = document | entry
    system = System(**{name: given[name] for name in System.__dataclass_fields__ if name in given})
    points = []
    for point in entry["points"]:
        about = entry | point
        load = Load(**{name: about[name] for name in Load.__dataclass_fields__ if name in about})
        values = {name: point.get(name) for name in Point.__dataclass_fields__ if name != "load"}
        points.append(Point(load, **values))
    return Series(entry["name"], entry["operator"], system, entry.get("left_out", ""), tuple(points))


@dataclass(frozen=True)
class Row:
    """One predicted number. error: predicted over measured, less 1; inside: in its 90 % interval"""

    series: str
    concurrency: int
    mode: str
    quantity: str
    measured: float
    predicted: Value
    error: float
    inside: bool


@dataclass(frozen=True)
class Errors:
    """Mean absolute error and bias of some rows; how many their 90 % intervals hold, and their width."""

    points: int
    mean: float
    bias: float
    covered: int
    width: float


@dataclass(frozen=True)
class Validated:
    """One server. times: where its kernel times come from; left_out: why it is in no total"""

    name: str
    rows: tuple[Row, ...]
    times: str = ""
    left_out: str = ""
    drafts: int = 0

    def errors(self, mode: str, quantity: str) -> Errors | None:
        rows = [row for row in self.rows if (row.mode, row.quantity) == (mode, quantity)]
        if not rows:
            return None
        n = len(rows)
        mean, bias = sum(abs(row.error) for row in rows) / n, sum(row.error for row in rows) / n
        width = sum((row.predicted.high - row.predicted.low) / row.predicted.value for row in rows) / n
        return Errors(n, mean, bias, sum(row.inside for row in rows), width)


@dataclass(frozen=True)
class Validation:
    """The validation. prior: the constants that all series together teach, with which a new system begins"""

    servers: tuple[Validated, ...]
    prior: Constants

    @property
    def together(self) -> Validated:
        """All servers without drafts, except those left out."""
        return self._all("all", speculate=False)

    @property
    def with_drafts(self) -> Validated:
        return self._all("all with drafts", speculate=True)

    def _all(self, name: str, *, speculate: bool) -> Validated:
        of = (each for each in self.servers if not each.left_out and bool(each.drafts) == speculate)
        return Validated(name, tuple(row for each in of for row in each.rows))

    @property
    def holds(self) -> bool:
        """Whether TPOT is as near as the documents promise, over all servers together."""
        found = [self.together.errors(mode, "TPOT") for mode in MODES]
        on_two = self.with_drafts.errors(ON_TWO, "TPOT")
        inside = all(errors.covered >= INSIDE * errors.points for errors in (*found, on_two) if errors)
        allowed = (found[-1], ALLOWED), (on_two, ALLOWED_DRAFTS)
        return inside and all(errors is None or errors.mean <= most for errors, most in allowed)


def validated(hardware: str = "", engine: str = "") -> Validation:
    """The validation against the stored series of a machine and an engine, or all. Raises UsageError."""
    servers: dict[str, list[Series]] = {}
    for series in stored_series():
        is_hardware = not hardware or series.system.hardware == hardware_name(hardware)
        if is_hardware and (not engine or series.system.engine == engine_name(engine)):
            servers.setdefault(series.server, []).append(series)
    if not servers:
        known = ", ".join(dict.fromkeys(series.kind for series in stored_series()))
        raise UsageError(f"no stored series is of that system; there are: {known}")
    measured = {series: _measured(series) for series in stored_series()}
    priors: dict[str, Constants] = {}
    found = []
    for name, of_server in servers.items():
        kind, times = of_server[0].kind, _model(of_server[-1].system).structure.where
        if kind not in priors:
            priors[kind] = _learnt({one: points for one, points in measured.items() if one.kind != kind})
        rows = _rows({series: measured[series] for series in of_server}, priors[kind])
        left_out = next(filter(None, (series.left_out for series in of_server)), "")
        found.append(Validated(name, tuple(rows), times, left_out, of_server[0].system.drafts or 0))
    return Validation(tuple(found), _learnt(measured))


@functools.cache
def _model(system: System) -> Link:
    return uncalibrated(system)


@functools.cache
def _measured(series: Series) -> list[Measured]:
    return _model(series.system).measured(series.points)


def _learnt(measured: dict[Series, list[Measured]]) -> Constants:
    systems: dict[str, dict[str, list[Measured]]] = {}
    for series, points in measured.items():
        if not (series.left_out or series.system.drafts):
            systems.setdefault(series.kind, {}).setdefault(series.server, []).extend(points)
    return learnt_constants({system: list(servers.values()) for system, servers in systems.items()})


def _rows(of_server: dict[Series, list[Measured]], prior: Constants) -> Iterable[Row]:
    shortest = min(of_server, key=lambda series: series.points[0].load.isl + series.points[0].load.osl)
    near = sorted(of_server[shortest], key=lambda each: each.point.load.concurrency)
    near = [each for each in near if each.point.load.concurrency <= CALIBRATED]
    fits: dict[str, Sequence[Measured]] = {UNCALIBRATED: []}
    if len(near) > 1:
        fits |= {ON_TWO: [near[0], near[-1]], ON_ALL: near}
    for mode, fit in fits.items():
        constants = prior.unsure(unsureness(shortest.system, calibrated=bool(fit))).fitted(fit)
        # With drafts there are few points: those at the shortest lengths that calibrate nothing count, too.
        used = set(map(id, fit if shortest.system.drafts else of_server[shortest] if fit else ()))
        left = [(one, each) for one in of_server for each in of_server[one] if id(each) not in used]
        for series, each in left:
            served, point = constants.served(each.sums), each.point
            output = (point.output_tok_s_gpu or 0.0) * series.system.tp
            predicted = (served.tpot, served.ttft_mean, served.output)
            seen = (point.tpot_ms, point.ttft_ms, output)
            for quantity, value, measured in zip(QUANTITIES, predicted, seen, strict=True):
                if measured:
                    about = (series.name, point.load.concurrency, mode, quantity, measured, value)
                    yield Row(*about, value.value / measured - 1, value.low <= measured <= value.high)


def unvalidated(system: System) -> list[str]:
    """A warning if no server of this machine and engine validates the model."""
    kind, drafts = f"{system.hardware} {system.engine}", bool(system.drafts)
    own = [each for each in stored_series() if (each.kind, bool(each.system.drafts)) == (kind, drafts)]
    every = validated(system.hardware, system.engine).servers if own else ()
    servers = [each for each in every if bool(each.drafts) == drafts]
    if any(not server.left_out for server in servers):
        return []
    off = [f"{server.name} was {100 * errors.mean:.0f} % off ({server.left_out})"
           for server in servers if (errors := server.errors(UNCALIBRATED, "TPOT"))]  # fmt: skip
    kind = f"public server of {system.engine} on {system.hardware}{' with drafts' if drafts else ''}"
    near = f"no {kind} was as near as the intervals say: {', '.join(off)}"
    return [near if off else f"there is no {kind} to compare this with"]
