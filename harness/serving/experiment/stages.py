"""Finished stages of an experiment, a file each: nothing finished is lost by a kill, or made twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from harness import archive, files
from harness.errors import HarnessError, UsageError, mistake, one_line
from harness.serving.experiment.spec import Experiment
from harness.serving.schema import StrictRecord

T = TypeVar("T", bound=StrictRecord)
PLAN = "experiment.json"


class Stages:
    """The files of a folder's `stages/`, and the experiment that they are of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def begin(folder: Path, experiment: Experiment, resume: bool) -> Stages:
        """Raises UsageError where the folder holds another experiment, or this one without `resume`."""
        stages, plan = Stages(folder), folder / PLAN
        if plan.exists():
            before = stages._read(plan, Experiment)
            if not resume:
                raise UsageError(
                    f"{folder} already holds {before.name}: --resume goes on with it; or another --out"
                )
            if changed := _changed(before, experiment):
                raise UsageError(f"{folder} was begun with another {changed}: choose another --out")
        elif resume:
            raise UsageError(f"{folder} holds no experiment to resume")
        else:
            stages._write(plan, experiment)
        return stages

    def done(self, name: str) -> bool:
        return archive.is_file(self._file(name))

    def once(self, name: str, kind: type[T], make: Callable[[], T]) -> T:
        """What the stage found: read where it is done, else made and written before this returns."""
        path = self._file(name)
        if archive.is_file(path):
            return self._read(path, kind)
        record = make()
        self._write(path, record)
        return record

    def _file(self, name: str) -> Path:
        return self.folder / "stages" / f"{name}.json"

    def _read(self, path: Path, kind: type[T]) -> T:
        try:
            return kind.model_validate_json(archive.read_bytes(path))
        except (OSError, ValidationError) as error:
            why = mistake(error) if isinstance(error, ValidationError) else one_line(error)
            raise UsageError(f"cannot read {path}: {why}; take it away to make it again") from None

    def _write(self, path: Path, record: StrictRecord) -> None:
        try:
            files.replace(path, record.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise HarnessError(
                f"cannot write {path}: {error.strerror}; what is finished stays, --resume goes on"
            ) from None


def _changed(before: Experiment, now: Experiment) -> str:
    """The first key that differs, or nothing."""
    old, new = (json.loads(experiment.resolved().model_dump_json()) for experiment in (before, now))
    return next((key for key in new if old.get(key) != new[key]), "")
