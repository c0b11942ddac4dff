"""Validation against all stored series: error, coverage and width of the intervals.

A server is one operator's, of one machine, engine and parallelism. Each is predicted with constants that
were learnt from all other machines and engines, in three ways: uncalibrated; calibrated on two of its points,
those of the fewest and the most requests in flight at its shortest lengths; and calibrated on all of these
up to MOST_CALIBRATING in flight. Points on which it was calibrated are not predicted. So no point has set a
constant that predicts it, except some kernel times of gfx942, which are MI325X's (kernel_times.py). Servers
with drafts teach no constants.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import PUBLISHED
from harness.serving.link.calibration import Constants, ModelledPoint, Point, Value, learnt_constants
from harness.serving.link.load import Load
from harness.serving.link.model import System, accept_length_deviation, uncalibrated
from harness.serving.names import engine_name, hardware_name
from shapes.attention import Parallel

STORED = PUBLISHED / "serving-link"
UNCALIBRATED, ON_TWO, ON_SHORTEST = "uncalibrated", "calibrated on two", "calibrated on the shortest"
MODES = (UNCALIBRATED, ON_TWO, ON_SHORTEST)
QUANTITIES = ("TPOT", "mean TTFT", "throughput")
MOST_CALIBRATING = 64  # requests in flight of a point that calibrates
# What the documents promise of TPOT: the largest mean error calibrated on the shortest lengths, that on two
# points with drafts, and the least share of points in their 90 % intervals.
MOST_ERROR, MOST_ERROR_DRAFTS, LEAST_INSIDE = 0.07, 0.1, 0.85


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
    """A series of a document. A document's values hold for all its series, theirs for all their points."""
    of_series = document | entry
    system = System(**{name: of_series[name] for name in System.__dataclass_fields__ if name in of_series})
    points = []
    for point in entry["points"]:
        of_point = entry | point
        load = Load(**{name: of_point[name] for name in Load.__dataclass_fields__ if name in of_point})
        measured = {name: point.get(name) for name in Point.__dataclass_fields__ if name != "load"}
        points.append(Point(load, **measured))
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
class PredictedServer:
    """The predictions of the points of one server, or of several together.

    times:    where its kernel times come from
    left_out: why the server is in no total; empty if it is in them
    """

    name: str
    rows: tuple[Row, ...]
    times: str = ""
    left_out: str = ""
    drafts: int = 0

    def errors(self, mode: str, quantity: str) -> Errors | None:
        """The errors of a quantity in a mode; None if nothing was predicted."""
        rows = [row for row in self.rows if (row.mode, row.quantity) == (mode, quantity)]
        if not rows:
            return None
        errors = [row.error for row in rows]
        widths = [(row.predicted.high - row.predicted.low) / row.predicted.value for row in rows]
        covered = sum(row.inside for row in rows)
        return Errors(len(rows), fmean(map(abs, errors)), fmean(errors), covered, fmean(widths))


@dataclass(frozen=True)
class Validation:
    """The validation. prior: the constants that all series together teach, with which a new system begins"""

    servers: tuple[PredictedServer, ...]
    prior: Constants

    def together(self, *, drafts: bool) -> PredictedServer:
        """All servers with or without drafts, except those left out."""
        servers = [server for server in self.servers if not server.left_out and bool(server.drafts) == drafts]
        name = "all with drafts" if drafts else "all"
        return PredictedServer(name, tuple(row for server in servers for row in server.rows))

    @property
    def holds(self) -> bool:
        """Whether TPOT is as near as the documents promise, over all servers together."""
        checks = [
            (False, UNCALIBRATED, math.inf),
            (False, ON_TWO, math.inf),
            (False, ON_SHORTEST, MOST_ERROR),
            (True, ON_TWO, MOST_ERROR_DRAFTS),
        ]
        for drafts, mode, most in checks:
            errors = self.together(drafts=drafts).errors(mode, "TPOT")
            if errors and (errors.mean > most or errors.covered < LEAST_INSIDE * errors.points):
                return False
        return True


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
    modelled = {series: _modelled(series) for series in stored_series()}
    priors: dict[str, Constants] = {}  # by kind, of all other kinds
    predicted_servers = []
    for name, of_server in servers.items():
        kind, system = of_server[0].kind, of_server[0].system
        if kind not in priors:
            others = {series: points for series, points in modelled.items() if series.kind != kind}
            priors[kind] = _learnt(others)
        rows = _rows({series: modelled[series] for series in of_server}, priors[kind])
        times = _model(system).structure.source
        left_out = next((series.left_out for series in of_server if series.left_out), "")
        predicted_servers.append(PredictedServer(name, tuple(rows), times, left_out, system.drafts or 0))
    return Validation(tuple(predicted_servers), _learnt(modelled))


_model = functools.cache(uncalibrated)


@functools.cache
def _modelled(series: Series) -> list[ModelledPoint]:
    return _model(series.system).modelled(series.points)


def _learnt(modelled: dict[Series, list[ModelledPoint]]) -> Constants:
    systems: dict[str, dict[str, list[ModelledPoint]]] = {}  # by kind, then by server
    for series, points in modelled.items():
        if not (series.left_out or series.system.drafts):
            systems.setdefault(series.kind, {}).setdefault(series.server, []).extend(points)
    return learnt_constants({kind: list(servers.values()) for kind, servers in systems.items()})


def _rows(of_server: dict[Series, list[ModelledPoint]], prior: Constants) -> Iterable[Row]:
    """The predictions of one server's points in each mode, except of points that calibrated it."""
    shortest = min(of_server, key=lambda series: series.points[0].load.isl + series.points[0].load.osl)
    near = [point for point in of_server[shortest] if point.point.load.concurrency <= MOST_CALIBRATING]
    near.sort(key=lambda point: point.point.load.concurrency)
    fits: dict[str, list[ModelledPoint]] = {UNCALIBRATED: []}
    if len(near) > 1:
        fits |= {ON_TWO: [near[0], near[-1]], ON_SHORTEST: near}
    for mode, fit in fits.items():
        deviation = accept_length_deviation(shortest.system, calibrated=bool(fit))
        constants = prior.with_unsure_accept_length(deviation).fitted(fit)
        # Of a calibrated server no point at the shortest lengths is predicted, so that both calibrations
        # predict the same points. With drafts there are too few for that.
        unpredicted = of_server[shortest] if fit and not shortest.system.drafts else fit
        for series, points in of_server.items():
            for modelled in points:
                if not any(modelled is other for other in unpredicted):
                    yield from _rows_of_point(series, modelled, mode, constants)


def _rows_of_point(series: Series, modelled: ModelledPoint, mode: str, constants: Constants) -> Iterable[Row]:
    served, point = constants.served(modelled.sums), modelled.point
    output_tok_s = (point.output_tok_s_gpu or 0.0) * series.system.tp
    pairs = ((served.tpot, point.tpot_ms), (served.ttft_mean, point.ttft_ms), (served.output, output_tok_s))
    for quantity, (predicted, measured) in zip(QUANTITIES, pairs, strict=True):
        if measured:
            error, inside = predicted.value / measured - 1, predicted.low <= measured <= predicted.high
            concurrency = point.load.concurrency
            yield Row(series.name, concurrency, mode, quantity, measured, predicted, error, inside)


def unvalidated(system: System) -> list[str]:
    """A warning if no server of this machine and engine validates the model, else an empty list. Servers with
    drafts validate systems with drafts, servers without drafts the others."""
    kind, has_drafts = f"{system.hardware} {system.engine}", bool(system.drafts)
    stored = {(series.kind, bool(series.system.drafts)) for series in stored_series()}
    servers = validated(system.hardware, system.engine).servers if (kind, has_drafts) in stored else ()
    off = []
    for server in servers:
        if bool(server.drafts) != has_drafts:
            continue
        if not server.left_out:
            return []
        if errors := server.errors(UNCALIBRATED, "TPOT"):
            off.append(f"{server.name} was {100 * errors.mean:.0f} % off ({server.left_out})")
    public = f"public server of {system.engine} on {system.hardware}{' with drafts' if has_drafts else ''}"
    if off:
        return [f"no {public} was as near as the intervals say: {', '.join(off)}"]
    return [f"there is no {public} to compare this with"]
