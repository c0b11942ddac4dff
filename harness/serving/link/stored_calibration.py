"""A calibration in a file: measured points of one system, and which system that is, to the letter."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import UsageError, mistake
from harness.files import write
from harness.serving.link.calibration import MeasuredPoint
from harness.serving.schema import StrictRecord

KEY = "calibration_of"


class System(StrictRecord):
    """What a calibration is of. version: of the engine, empty where no run says it; kv: dtype of the cache"""

    hardware: str
    engine: str
    version: str = ""
    tp: int
    ep: int
    dp: int
    kv: str

    def __str__(self) -> str:
        engine = f"{self.engine} {self.version}".strip()
        return f"{self.hardware} with {engine} at tp{self.tp} ep{self.ep} dp{self.dp}, {self.kv} cache"


class StoredCalibration(StrictRecord):
    """runs: the files that the points were read from"""

    calibration_of: System
    runs: tuple[str, ...]
    points: tuple[MeasuredPoint, ...]


def store(path: Path, of: System, runs: Sequence[str], points: Sequence[MeasuredPoint]) -> None:
    """Raises UsageError where it cannot be written."""
    kept = StoredCalibration(calibration_of=of, runs=tuple(runs), points=tuple(points))
    write(str(path), kept.model_dump_json(indent=1))


def stored(path: Path, asked: System) -> StoredCalibration | None:
    """What the file keeps; None where it is no stored calibration. Versions are not compared: that of `asked`
    is empty. Raises UsageError for one of another system, or one that is broken."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or KEY not in document:
        return None
    try:
        kept = StoredCalibration.model_validate(document)
    except (ValidationError, UsageError) as error:
        raise UsageError(f"cannot read {path}: {mistake(error)}") from None
    if kept.calibration_of.model_copy(update={"version": asked.version}) != asked:
        raise UsageError(f"{path} is a calibration of {kept.calibration_of}, not of {asked}")
    times = [(p.tpot_ms, p.ttft_ms, p.output_tok_s_gpu) for p in kept.points]
    if not times or not all(0 < value < math.inf for point in times for value in point):
        raise UsageError(f"cannot read {path}: it wants points with times above 0")
    return kept
