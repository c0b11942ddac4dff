"""A calibration in a file: measured points of one system, and which system that is, to the letter."""

from __future__ import annotations

import json
import math
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
    """runs: the files that the points were read from; unsaid: what these do not say of the system, which who
    stored them took for granted"""

    calibration_of: System
    runs: tuple[str, ...]
    unsaid: tuple[str, ...] = ()
    points: tuple[MeasuredPoint, ...]


def store(path: Path, kept: StoredCalibration) -> None:
    """Raises UsageError where it cannot be written, or would take the place of another kind of file."""
    if path.exists() and not _is_calibration(path):
        raise UsageError(f"{path} is there already and no stored calibration: take another name")
    write(str(path), kept.model_dump_json(indent=1) + "\n")


def _is_calibration(path: Path) -> bool:
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and KEY in document


def stored(path: Path, asked: System) -> StoredCalibration | None:
    """What the file keeps; None where it is no stored calibration. Versions are not compared: that of `asked`
    is empty. Raises UsageError for one of another system, or one that is broken."""
    if not _is_calibration(path):
        return None
    try:
        kept = StoredCalibration.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UsageError) as error:
        raise UsageError(f"cannot read {path}: {mistake(error)}") from None
    if kept.calibration_of.model_copy(update={"version": asked.version}) != asked:
        raise UsageError(f"{path} is a calibration of {kept.calibration_of}, not of {asked}")
    times = [
        time
        for p in kept.points
        for time in (p.tpot_ms, p.ttft_ms, p.output_tok_s_gpu, p.ttft_median_ms, p.ttft_p99_ms)
        if time is not None
    ]
    if not times or not all(0 < time < math.inf for time in times):
        raise UsageError(f"cannot read {path}: it wants points with times above 0")
    return kept
