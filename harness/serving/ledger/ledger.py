"""The ledger: a kernel change, what was predicted of it, what was observed, and whether the one explains the
other.

A ledger is a file of lines that is only ever added to. Every line holds its time and the hash of the line
before it, so that a line which is changed, left out or moved shows. The hashes have no key: whoever makes all
of them anew, or cuts the end off, shows only to somebody who holds a seal of the ledger as it was.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from harness.errors import HarnessError, UsageError
from harness.files import JournalFull, JsonLines, whole_lines
from harness.serving.ledger.prediction import KernelChange, Prediction, QuantityName, Unit
from harness.serving.schema import OfferedLoad, Parallelism, StrictRecord

START = "0" * 64
OPENING = b'{"row":'
"""What each line begins with, the first that a kill broke off too."""
CLOCKS_APART = timedelta(days=1)
"""A line may be dated so far ahead of this machine's clock."""


class Setting(StrictRecord):
    """Where a change was made: the machine, the engine, the load.

    precision: of the weights' products, as `fp8 block-scale`; kv_cache: the dtype of the cache
    plain:     whether there is neither speculative decoding, nor attention over data-parallel ranks, nor
               prefill on other GPUs than decode
    launch:    of decode steps, graph or eager; recv_interval: of them between two looks for requests
    prefill_tokens: of one step, at most
    """

    hardware: str = ""
    gpus: int | None = None
    engine: str = ""
    version: str = ""
    model: str = ""
    precision: str = ""
    kv_cache: str = ""
    plain: bool | None = None
    launch: str = ""
    recv_interval: int | None = None
    prefill_tokens: int | None = None
    parallelism: Parallelism = Parallelism()
    workload: OfferedLoad = OfferedLoad()
    client: str = ""
    note: str = ""


class Observation(StrictRecord):
    """What a serving run showed, before and after.

    change:    after - before
    low, high: its 90 % interval; None where who measured gave none
    pairs:     runs before and after that were paired
    resolution: part of `before` below which a change is not told from none; None: the ledger's own
    runs:      files or folders of the runs, by which it can be made again
    assumed:   of what tells whether the runs are of the row's setting, what the user took for granted
    """

    quantity: QuantityName
    unit: Unit
    before: float
    after: float
    change: float
    low: float | None = None
    high: float | None = None
    pairs: int | None = None
    resolution: float | None = None
    source: str = ""
    runs: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @model_validator(mode="after")
    def is_a_difference(self) -> Observation:
        slack = 1e-3 * max(abs(self.before), abs(self.change))
        if abs(self.change - (self.after - self.before)) > slack:
            raise ValueError(f"change {self.change:g} is not {self.after:g} - {self.before:g}")
        return self


class Line(StrictRecord):
    """What all lines have. row: the row of the ledger that it belongs to; at: ISO 8601, UTC."""

    row: str
    at: str = ""
    previous: str = ""
    digest: str = ""


class ChangeEntry(Line):
    kind: Literal["change"] = "change"
    changes: tuple[KernelChange, ...]
    setting: Setting


class PredictionEntry(Line):
    kind: Literal["prediction"] = "prediction"
    prediction: Prediction


class ObservationEntry(Line):
    kind: Literal["observation"] = "observation"
    observation: Observation


class ExplanationEntry(Line):
    """What is known of a miss: text, and the numbers or files that show it."""

    kind: Literal["explanation"] = "explanation"
    text: str
    evidence: tuple[str, ...] = ()


Entry = Annotated[
    ChangeEntry | PredictionEntry | ObservationEntry | ExplanationEntry, Field(discriminator="kind")
]
ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


class LedgerRow(StrictRecord):
    """All that a ledger says of one change.

    ledger:    the file, or the publication that it is from
    published: whether others observed it; lacks: what they do not say
    """

    id: str
    changes: tuple[KernelChange, ...] = ()
    setting: Setting = Setting()
    predictions: tuple[PredictionEntry, ...] = ()
    observations: tuple[ObservationEntry, ...] = ()
    explanations: tuple[ExplanationEntry, ...] = ()
    ledger: str = ""
    published: bool = False
    lacks: tuple[str, ...] = ()


def digest(line: Mapping[str, Any]) -> str:
    """SHA-256 of a line as it is written, without its own digest: a field that a later schema adds changes
    nothing of it."""
    text = json.dumps({k: v for k, v in line.items() if k != "digest"}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def append(path: Path, entry: Entry) -> Entry:
    """Adds a line, on disk when this returns; gives it as written. Raises UsageError where the file cannot
    be read or written, or where what it would be added to is broken."""
    written = read(path) if path.exists() else []
    at = entry.at or datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    previous = written[-1].digest if written else START
    sealed = entry.model_copy(update={"at": at, "previous": previous, "digest": ""})
    sealed = sealed.model_copy(update={"digest": digest(json.loads(sealed.model_dump_json()))})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _lines(path).append(sealed.model_dump_json())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    except JournalFull as error:
        raise UsageError(str(error)) from None
    return sealed


def read(path: Path) -> list[Entry]:
    """The lines of a ledger. Raises UsageError for a file that is none, and where a line is broken, altered,
    out of its order, of the future, or the last has lost its newline; a last line that a kill broke off is
    left out."""
    _require_ledger(path)
    entries: list[Entry] = []
    latest = (datetime.now(timezone.utc) + CLOCKS_APART).isoformat()
    for number, (entry, hashed) in enumerate(_lines(path).records(), 1):
        expected = entries[-1].digest if entries else START
        if entry.previous != expected or entry.digest != hashed:
            raise UsageError(f"{path}, line {number}: altered, or a line before it was taken out")
        if entries and entry.at < entries[-1].at:
            raise UsageError(f"{path}, line {number}: dated {entry.at}, before the line above it")
        if entry.at > latest:
            raise UsageError(f"{path}, line {number}: dated {entry.at}, which is yet to come")
        entries.append(entry)
    _require_newline(path, len(entries))
    return entries


def _require_ledger(path: Path) -> None:
    start = _text(path)[: len(OPENING)]
    if not OPENING.startswith(start):
        raise UsageError(f"{path} is no ledger: `serving link --ledger` writes one")


def _require_newline(path: Path, lines: int) -> None:
    """A whole line without its end would be written over as one that a kill broke off."""
    data = path.read_bytes()
    try:
        ENTRY.validate_json(data[whole_lines(data) :])
    except ValueError:
        return
    raise UsageError(f"{path}, line {lines + 1}: it has lost its newline; add one, or take the line out")


def seal(path: Path) -> str:
    """`LINES:DIGEST` of a ledger as it is: what a commit or somebody else can hold. Raises UsageError."""
    entries = read(path)
    if not entries:
        raise UsageError(f"{path} has no line to seal")
    return f"{len(entries)}:{entries[-1].digest}"


def require_sealed(path: Path, sealed: str) -> int:
    """How many lines were added since a seal. Raises HarnessError where the ledger does not begin with what
    was sealed, UsageError for what is no seal."""
    match = re.fullmatch(r"([1-9]\d*):([0-9a-f]{64})", sealed.strip())
    if not match:
        raise UsageError(f"cannot read the seal {sealed!r}; it is LINES:DIGEST, as --seal prints it")
    lines, entries = int(match[1]), read(path)
    if len(entries) < lines:
        raise HarnessError(f"{path} has {len(entries)} lines, {lines} were sealed: its end was cut off")
    if entries[lines - 1].digest != match[2]:
        raise HarnessError(f"{path}: its first {lines} lines are not those that were sealed")
    return len(entries) - lines


def _lines(path: Path) -> JsonLines[tuple[Entry, str]]:
    """Each with the digest that it should have."""
    return JsonLines(path, lambda line: (ENTRY.validate_json(line), digest(json.loads(line))), _text)


def _text(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        data.decode()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {path}: no UTF-8 text") from None
    return data


def rows(entries: list[Entry], ledger: str = "") -> list[LedgerRow]:
    """The ledger's rows, in the order in which they were opened."""
    by_id: dict[str, LedgerRow] = {}
    for entry in entries:
        row = by_id.get(entry.row, LedgerRow(id=entry.row, ledger=ledger))
        match entry:
            case ChangeEntry():
                update = {"changes": entry.changes, "setting": entry.setting}
            case PredictionEntry():
                update = {"predictions": (*row.predictions, entry)}
            case ObservationEntry():
                update = {"observations": (*row.observations, entry)}
            case ExplanationEntry():
                update = {"explanations": (*row.explanations, entry)}
        by_id[entry.row] = row.model_copy(update=update)
    return list(by_id.values())
