"""What `serving link --json` writes, as far as a page shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import UsageError, mistake
from harness.serving.ledger.prediction import Prediction


class ForecastRecord(BaseModel):
    """A part of the document; what a page does not show may be there."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class ForecastValue(ForecastRecord):
    """With its 90 % interval."""

    value: float
    low: float
    high: float


class ForecastTerm(ForecastRecord):
    """What one kernel takes of TPOT, ms; name: `OP` or `OP:PART`."""

    name: str
    origin: str
    calls: int
    decode_ms: float
    stall_ms: float
    share: ForecastValue

    @property
    def op_class(self) -> str:
        return self.name.partition(":")[0]


class ForecastLoad(ForecastRecord):
    isl: int
    osl: int
    concurrency: int


class ForecastNeed(ForecastRecord):
    """See harness.serving.link.inverse.Need."""

    ops: tuple[str, ...]
    factor: float | None
    limit_ms: float
    most_ms: float
    share: float


class ForecastWorkload(ForecastRecord):
    load: ForecastLoad
    tpot: ForecastValue
    ttft_mean: ForecastValue
    output: ForecastValue
    decode_ms: float
    stall_ms: float
    shares: tuple[ForecastTerm, ...] = ()
    changes: tuple[Prediction, ...] = ()
    needs: tuple[ForecastNeed, ...] = ()


class ForecastConstants(ForecastRecord):
    kappa: ForecastValue | None = None


class ForecastDocument(ForecastRecord):
    """Without workloads where only bounds, or a validation, were asked for."""

    hardware: str = ""
    engine: str = ""
    parallel: str = ""
    gpus: int | None = None
    tables: str = ""
    constants: ForecastConstants = ForecastConstants()
    calibration: tuple[str, ...] = ()
    what_if: tuple[str, ...] = ()
    target_tpot_ms: float | None = None
    notes: tuple[str, ...] = ()
    workloads: tuple[ForecastWorkload, ...] = ()


def parse_forecast(document: Mapping[str, Any], name: str) -> ForecastDocument:
    """Raises UsageError."""
    try:
        return ForecastDocument.model_validate(document)
    except ValidationError as error:
        raise UsageError(f"cannot read {name}: no forecast of serving link: {mistake(error)}") from None
