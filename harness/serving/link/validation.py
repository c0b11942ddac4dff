"""Validation against every stored series: error, coverage and width, for servers that the model has not seen.

Each server (one operator's, of one machine, engine and parallelism) is predicted with constants that were
learnt from all other systems, none of whose points is of its machine and engine:

- uncalibrated: from other operators' points of the same system, where there are any;
- calibrated on two: its points of the fewest and the most requests in flight, at its shortest lengths;
- calibrated on all of the shortest lengths, up to CALIBRATED in flight.

What was calibrated on is not predicted. So no number here is of a point that set a constant, but for the kernel
times of gfx942, two figures of which are MI325X's (assumed_times.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import UsageError
from harness.serving.link.calibration import Constants, Measured, Value, learnt_constants
from harness.serving.link.model import Link, System, on_others_points, uncalibrated
from harness.serving.link.points import Series, stored_series
from harness.serving.link.times.tables import read_tables
from harness.serving.names import engine_name, hardware_name

UNCALIBRATED, ON_TWO, ON_ALL = "uncalibrated", "calibrated on two", "calibrated on the shortest"
MODES = (UNCALIBRATED, ON_TWO, ON_ALL)
QUANTITIES = ("TPOT", "mean TTFT", "throughput")
CALIBRATED = 64
"""Requests in flight of points that are calibrated on, at most."""


@dataclass(frozen=True)
class Row:
    """One predicted number. error: predicted over measured less 1"""

    series: str
    concurrency: int
    mode: str
    quantity: str
    measured: float
    predicted: Value

    @property
    def error(self) -> float:
        return self.predicted.value / self.measured - 1

    @property
    def covered(self) -> bool:
        return self.predicted.covers(self.measured)


@dataclass(frozen=True)
class Errors:
    """Of one quantity over some rows: mean absolute error, bias, how many lie in their 90 % interval, and the
    mean width of these over the value."""

    points: int
    mean: float
    bias: float
    covered: int
    width: float

    @classmethod
    def of(cls, rows: Collection[Row]) -> Errors:
        count = len(rows)
        return cls(
            count,
            sum(abs(row.error) for row in rows) / count,
            sum(row.error for row in rows) / count,
            sum(row.covered for row in rows),
            sum(row.predicted.width for row in rows) / count,
        )


@dataclass(frozen=True)
class ServerValidation:
    """name: the server's; times: where its kernels' times are from; left_out: why it is in no total"""

    name: str
    times: str
    rows: tuple[Row, ...]
    left_out: str = ""

    def errors(self, mode: str, quantity: str) -> Errors | None:
        rows = [row for row in self.rows if (row.mode, row.quantity) == (mode, quantity)]
        return Errors.of(rows) if rows else None


@dataclass(frozen=True)
class Validation:
    """prior: what all series together teach, which a new system begins at"""

    servers: tuple[ServerValidation, ...]
    prior: Constants

    def errors(self, mode: str, quantity: str) -> Errors | None:
        """Over all servers but those left out."""
        rows = [row for server in self.servers if not server.left_out for row in server.rows
                if (row.mode, row.quantity) == (mode, quantity)]  # fmt: skip
        return Errors.of(rows) if rows else None


def validated(hardware: str = "", engine: str = "", tables: str = "") -> Validation:
    """Of all stored series, or of those of a machine and an engine. tables: a set of AIConfigurator's tables in
    place of this project's times, for their machine and engine. Raises UsageError where there is none."""
    models = _Models(tables)
    learning = [series for series in stored_series() if not series.left_out]
    wanted = [
        series
        for series in stored_series()
        if (not hardware or series.hardware == hardware_name(hardware))
        and (not engine or series.engine == engine_name(engine))
        and (not tables or series.system == models.system)
    ]
    if not wanted:
        known = dict.fromkeys(series.system for series in stored_series())
        raise UsageError(f"no stored series is of that system; there are: {', '.join(known)}")
    servers = []
    for name in dict.fromkeys(series.server for series in wanted):
        of_server = [series for series in wanted if series.server == name]
        servers.append(_server(name, of_server, learning, models))
    return Validation(tuple(servers), _learnt(learning, models))


class _Models:
    """Models by what they are of, made once, and the measured points of series."""

    def __init__(self, tables: str) -> None:
        self.tables = read_tables(Path(tables)) if tables else None
        self.made: dict[object, Link] = {}
        self.points: dict[tuple[str, str], list[Measured]] = {}

    @property
    def system(self) -> str:
        if self.tables is None:
            return ""
        return f"{hardware_name(self.tables.device)} {engine_name(self.tables.engine)}"

    def of(self, series: Series) -> Link:
        key = series.system, series.parallel, series.kv
        if key not in self.made:
            parallel = series.parallel
            system = System(
                hardware=series.hardware, engine=series.engine, tp=parallel.tp, ep=parallel.ep, kv=series.kv
            )
            own = self.tables if series.system == self.system else None
            self.made[key] = uncalibrated(system, own)
        return self.made[key]

    def measured(self, series: Series) -> list[Measured]:
        key = series.server, series.name
        if key not in self.points:
            self.points[key] = self.of(series).measured(series.points, series.warm)
        return self.points[key]


def _learnt(learning: Iterable[Series], models: _Models) -> Constants:
    systems: dict[str, dict[str, list[Measured]]] = {}
    for series in learning:
        of_server = systems.setdefault(series.system, {}).setdefault(series.server, [])
        of_server += models.measured(series)
    return learnt_constants({system: list(servers.values()) for system, servers in systems.items()})


def _server(
    name: str, of_server: Sequence[Series], learning: Sequence[Series], models: _Models
) -> ServerValidation:
    first = of_server[0]
    others = [series for series in learning if series.system == first.system and series.server != name
              and series.parallel == first.parallel and series.operator != first.operator]  # fmt: skip
    prior = _learnt([series for series in learning if series.system != first.system], models)
    model = models.of(first)
    shortest = min(of_server, key=lambda series: sum(series.points[0].load.lengths))
    near = sorted(
        (each for each in models.measured(shortest) if each.point.load.concurrency <= CALIBRATED),
        key=lambda each: each.point.load.concurrency,
    )
    constants: Mapping[str, Constants] = {
        UNCALIBRATED: on_others_points(model, others, prior).constants,
        ON_TWO: prior.fitted([near[0], near[-1]]),
        ON_ALL: prior.fitted(near),
    }
    rows = [
        row
        for mode in MODES
        for series in of_server
        if mode == UNCALIBRATED or series is not shortest
        for each in models.measured(series)
        for row in _rows(series.name, mode, replace(model, constants=constants[mode]), each)
    ]
    left_out = next((series.left_out for series in of_server if series.left_out), "")
    return ServerValidation(name, model.structure.where, tuple(rows), left_out)


def _rows(series: str, mode: str, model: Link, measured: Measured) -> Iterable[Row]:
    point = measured.point
    served = model.constants.served(measured.sums, measured.cold)
    of_instance = point.output_tok_s_gpu and point.output_tok_s_gpu * model.gpus
    for quantity, predicted, seen in (
        ("TPOT", served.tpot, point.tpot_ms),
        ("mean TTFT", served.ttft_mean, point.ttft_ms),
        ("throughput", served.output, of_instance),
    ):
        if seen:
            yield Row(series, point.load.concurrency, mode, quantity, seen, predicted)
