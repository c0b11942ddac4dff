"""Any supported client's file, as runs of one schema, each held to the integrity tests."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from harness.serving.formats import FORMATS
from harness.serving.integrity import examined
from harness.serving.reading import UnreadableError, plain, read
from harness.serving.schema import ServingRun


def load(path: str | Path) -> list[ServingRun]:
    """The runs in a file, in its order, with what the integrity tests find in `findings`.

    Raises UnreadableError (a UsageError) where the file cannot be read or is of no known client.
    """
    path = Path(path)
    document = read(path)
    known = next((one for one in FORMATS if one.recognises(document)), None)
    if known is None and document.not_json:
        raise UnreadableError(document.not_json)
    if known is None:
        names = ", ".join(one.NAME for one in FORMATS)
        raise UnreadableError(f"cannot read {path}: of no known client; known: {names}")
    try:
        runs = known.runs(document)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise UnreadableError(f"cannot read {path} as {known.NAME}: {at}: {first['msg']}") from None
    if not runs:
        raise UnreadableError(f"cannot read {path} as {known.NAME}: no run in it")
    return [examined(run.model_copy(update={"extra": plain(run.extra)})) for run in runs]
