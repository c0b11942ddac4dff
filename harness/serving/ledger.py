"""A ledger: changes of kernels, what was predicted of each, and what serving runs showed.

It is a file of JSON lines. Lines are only added, under a lock on the file, so that two commands can write to
one ledger at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, model_validator

from harness.errors import UsageError
from harness.files import JsonLines, whole_lines
from harness.files import append as append_text
from harness.paths import RESULTS
from harness.report.text import ranged
from harness.serving.clients.load import beside_each_other, load
from harness.serving.compare import identity
from harness.serving.compare.alike import Quantity, compare, of_instance
from harness.serving.compare.identity import Setting
from harness.serving.compare.settings import other_differences
from harness.serving.schema import LenientRecord, ServingRun, StrictRecord
from harness.statistics.intervals import mean_half_width

NAME = "ledger.jsonl"
OPENING = b'{"row":'  # the beginning of every line
Method = Literal["link", "isolated-warm", "isolated-cold", "serving-mode", "replay", "bound"]
Quantities = Literal["tpot", "itl", "ttft", "e2e", "output_throughput", "decode_step", "prefill", "duration"]
Unit = Literal["ms", "s", "tok/s", "1"]
"""`s`: of the duration of a client's whole run; `1`: only the ratio of after to before is known."""
CONFIDENCE = 0.9
RELEASE = re.compile(r"\d+(?:\.\d+)+")
"""The release at the beginning of a version. What follows distinguishes builds of it."""
METRICS: dict[str, tuple[str, ...]] = {name: (name, "mean") for name in ("tpot", "itl", "ttft", "e2e")}
METRICS["output_throughput"] = ("throughput", "total", "output")
"""From each quantity that a client measures to the name, statistic and kind of tokens of its metric."""


def unit_text(unit: str) -> str:
    """The unit in words for a reader."""
    return "x before" if unit == "1" else unit


class KernelChange(LenientRecord):
    """A change of the speed of one op."""

    op: str  # a name of harness/catalogue/op_classes.json
    part: str = ""  # for example `qkv_a` or `n=2112 k=7168`; empty: all calls of the op
    factor: float | None = Field(default=None, gt=0)
    """Time before / time after, above 1 is faster; None if `saved_us` is given."""
    saved_us: float | None = None  # time saved in each call
    low: float | None = None  # 90 % interval of the factor or of the saving
    high: float | None = None
    calls: int | None = None  # in a step; None: as in the model
    phase: Literal["decode", "prefill", "both"] = "both"  # of which steps
    source: str = ""  # where the factor comes from: a run, a pull request


class Prediction(LenientRecord):
    """A predicted change of a quantity."""

    quantity: Quantities
    unit: Unit
    method: Method
    of: str = ""  # the one change that it is for (for an A/B, the arm); empty: all changes of its row
    change: float | None = None
    low: float | None = None  # 90 % interval of `change`; for a bound one of them is None
    high: float | None = None
    before: float | None = None  # None, as `after`, if only the difference or a bound is known
    after: float | None = None
    assumptions: tuple[str, ...] = ()


class Observation(LenientRecord):
    """What serving runs showed before and after a change."""

    quantity: Quantities
    unit: Unit
    before: float
    after: float
    change: float  # after - before, in `unit`
    low: float | None = None  # 90 % interval of the change; None if the source gives none
    high: float | None = None
    pairs: int | None = None
    source: str = ""
    runs: tuple[str, ...] = ()  # files or folders
    digests: tuple[str, ...] = ()  # of the runs' numbers
    assumed: tuple[str, ...] = ()  # identity fields that the runs do not tell, assumed to be alike

    @model_validator(mode="after")
    def is_a_difference(self) -> Observation:
        slack = 1e-3 * max(abs(self.before), abs(self.change))
        if abs(self.change - (self.after - self.before)) > slack:
            raise ValueError(f"change {self.change:g} is not {self.after:g} - {self.before:g}")
        return self


class EntryOfRow(LenientRecord):
    """What every line of the file has. row: the name of its row; at: the time, ISO 8601, UTC"""

    row: str
    at: str = ""


class ChangeEntry(EntryOfRow):
    """Opens a row."""

    kind: Literal["change"] = "change"
    changes: tuple[KernelChange, ...]
    setting: Setting


class PredictionEntry(EntryOfRow):
    """A prediction. command: the one that prints it; empty if it is not known"""

    kind: Literal["prediction"] = "prediction"
    prediction: Prediction
    command: str = ""


class ObservationEntry(EntryOfRow):
    kind: Literal["observation"] = "observation"
    observation: Observation


class ExplanationEntry(EntryOfRow):
    """What is known of the difference between prediction and observation: a text, and what shows it."""

    kind: Literal["explanation"] = "explanation"
    text: str
    evidence: tuple[str, ...] = ()


Entry = ChangeEntry | PredictionEntry | ObservationEntry | ExplanationEntry
ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


class LedgerRow(StrictRecord):
    """All entries of one row. ledger: its file"""

    id: str
    changes: tuple[KernelChange, ...] = ()
    setting: Setting = Setting()
    predictions: tuple[PredictionEntry, ...] = ()
    observations: tuple[ObservationEntry, ...] = ()
    explanations: tuple[ExplanationEntry, ...] = ()
    ledger: str = ""


def append(path: Path, *entries: Entry) -> list[Entry]:
    """Adds entries, all or none, with the present time if they have none. Returns them as they are on disk.
    Raises UsageError if the file cannot be written, is no ledger, or has a row that would be opened again."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    dated = [entry if entry.at else entry.model_copy(update={"at": now}) for entry in entries]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = {entry.row for entry in read(path)}
            for entry in dated:
                if isinstance(entry, ChangeEntry) and entry.row in known:
                    raise UsageError(f"{path} has a row {entry.row!r} already; use another --ledger FILE")
            append_text(path, "".join(f"{entry.model_dump_json()}\n" for entry in dated))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return dated


def read(path: Path) -> list[Entry]:
    """The entries of a ledger, without a last line that a kill cut off. Raises UsageError for a file that is
    no ledger, for a line that cannot be read, and for a whole last line without a newline."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if not OPENING.startswith(data[: len(OPENING)]):
        what = f"no ledger, whose lines begin with {OPENING.decode()} (`serving load` reads clients' files)"
        raise UsageError(f"{path} is {what}")
    entries = list(JsonLines(path, ENTRY.validate_json, lambda _: data).records())
    try:
        ENTRY.validate_json(data[whole_lines(data) :])  # what follows the last newline
    except ValueError:
        return entries  # nothing follows, or a part of a line, which `append` cuts off
    raise UsageError(f"{path}, line {len(entries) + 1}: its newline is missing; add one, or remove the line")


def rows(entries: Sequence[Entry], ledger: str = "") -> list[LedgerRow]:
    """The ledger's rows, in the order in which they were opened."""
    by_id: dict[str, LedgerRow] = {}
    for entry in entries:
        row = by_id.get(entry.row, LedgerRow(id=entry.row, ledger=ledger))
        if isinstance(entry, ChangeEntry):
            update: dict[str, object] = {"changes": entry.changes, "setting": entry.setting}
        else:
            field = f"{entry.kind}s"  # predictions, observations or explanations
            update = {field: (*getattr(row, field), entry)}
        by_id[entry.row] = row.model_copy(update=update)
    return list(by_id.values())


def known_rows(files: Sequence[str]) -> Iterator[LedgerRow]:
    """The rows of these files or folders, or of all ledgers under results/. Raises UsageError."""
    paths = [Path(name) for name in files] or sorted(RESULTS.glob(f"**/{NAME}"))
    for path in paths:
        path = path / NAME if path.is_dir() else path
        if not path.exists():
            raise UsageError(f"cannot read {path}: no such ledger")
        shown = path.relative_to(RESULTS.parent) if path.is_relative_to(RESULTS.parent) else path
        yield from rows(read(path), str(shown))


def observe(
    ledger: Path,
    row_id: str,
    before: Sequence[str],
    after: Sequence[str],
    *,
    assumed: Sequence[str] = (),
    engine: str = "",
    explanation: str = "",
) -> None:
    """Appends an observation for each quantity that was predicted for the row and that the runs have. Other
    differences between the sides, and what `serving load` suspects, are added as explanations. Raises
    UsageError if the runs cannot be paired, are not of the row's setting, or have wrong numbers.

    before, after: any client's files, paired in order
    assumed:       see `identity.differences`
    engine:        of all runs, if their files do not tell it
    """
    identity.require_names("--assume", assumed, ("all", *identity.FIELDS))
    known = {row.id: row for row in rows(read(ledger), str(ledger))}
    if row_id not in known:
        raise UsageError(f"{ledger} has no row {row_id!r}; rows: {', '.join(known) or 'none'}")
    row = known[row_id]
    runs_before = [identity.with_engine(run, engine) for name in before for run in load(name)]
    runs_after = [identity.with_engine(run, engine) for name in after for run in load(name)]
    count = len(runs_before)
    if count != len(runs_after):
        raise UsageError(f"{count} runs before and {len(runs_after)} after: pairs are wanted")
    runs = beside_each_other([*runs_before, *runs_after])
    _require_right_numbers(runs)
    _require_setting(row.setting, runs, assumed)
    # No difference is known, so these are the fields that are assumed to be alike.
    not_said = {field.name for run in runs for field in identity.differences(row.setting, run)}
    taken_alike = tuple(name for name in identity.FIELDS if name in not_said)
    pairs = list(zip(runs[:count], runs[count:], strict=True))
    explanations = dict.fromkeys([explanation, *(text for pair in pairs for text in _beside(*pair))])
    predicted = dict.fromkeys(entry.prediction.quantity for entry in row.predictions)
    entries = []
    for quantity in predicted:
        if quantity in METRICS and (seen := observation(quantity, pairs)):
            seen = seen.model_copy(update={"assumed": taken_alike})
            entries.append(ObservationEntry(row=row_id, observation=seen))
    earlier: set[str] = set()  # digests of runs, or their files in older observations
    for entry in row.observations:
        earlier.update(entry.observation.digests or entry.observation.runs)
    if again := [run.id for run in runs if _digest(run) in earlier or run.source in earlier]:
        raise UsageError(f"row {row_id} of {ledger} has {', '.join(again)} already; a run counts once")
    if not entries:
        raise UsageError(f"none of {', '.join(predicted)} is in all of these runs")
    append(ledger, *entries, *(ExplanationEntry(row=row_id, text=text) for text in explanations if text))


def _require_right_numbers(runs: Sequence[ServingRun]) -> None:
    """Raises UsageError if `serving load` finds a run wrong, or the same as another."""
    wrong = [[finding for finding in run.findings if finding.severity == "wrong"] for run in runs]
    if messages := [findings[0].message for findings in wrong if findings]:
        of_runs = f"{len(messages)} of these runs"
        raise UsageError(f"`serving load` finds numbers of {of_runs} wrong: {messages[0]}")
    for finding in [finding for run in runs for finding in run.findings]:
        if finding.rule == "repeated":
            raise UsageError(f"{finding.message}; a run counts once")


def _require_setting(setting: Setting, runs: Sequence[ServingRun], assumed: Sequence[str]) -> None:
    """Raises UsageError if a run is not of the setting. assumed: see `identity.differences`"""
    for run in runs:
        if unlike := identity.differences(setting, run, assumed):
            hint = "" if all(field.is_known for field in unlike) else "; --assume NAME takes it to be alike"
            raise UsageError(f"{run.id} is no run of this row: {identity.in_words(unlike)}{hint}")


def _digest(run: ServingRun) -> str:
    """A digest of what the run measured, because a file may have moved."""
    return hashlib.sha256(repr((run.totals, run.metrics)).encode()).hexdigest()[:16]


def _beside(before: ServingRun, after: ServingRun) -> Iterator[str]:
    """What differs between a run before and one after, and what `serving load` suspects of them. Raises
    UsageError if they differ in a known field of the identity. Versions may differ unless they name two
    releases: others are builds."""
    for field in identity.unlike(identity.of_run(before), identity.of_run(after)):
        value, value_after = field.a, field.b
        releases = {release[0] for text in (value, value_after) if (release := RELEASE.match(text))}
        are_builds = field.name == "version" and len(releases) <= 1
        both = f"{value or 'unknown'} before, {value_after or 'unknown'} after"
        if field.is_known and not are_builds:
            why = f"differ in more than the row's change: {field.name} {both}"
            raise UsageError(f"{before.id} and {after.id} {why}")
        if value or value_after:
            yield f"{field.name}: {both}"
    yield from (f"before against after: {line}" for line in other_differences(before, after))
    for finding in (*before.findings, *after.findings):
        if finding.severity == "suspect":
            yield f"suspect: {finding.message}"


def observation(quantity: str, pairs: Sequence[tuple[ServingRun, ServingRun]]) -> Observation | None:
    """The mean difference of the pairs, over the whole instance, with its t-interval; None if a run lacks the
    metric. Raises UsageError if a pair's numbers are of two kinds or of an unknown number of GPUs."""
    values = []  # of each pair: before, after
    for pair in pairs:
        sides = [Quantity(run, metric) for run in pair if (metric := run.metric(*METRICS[quantity]))]
        if len(sides) < 2:  # a run without the metric has no side
            return None
        where = f"{quantity} of {pair[0].id} and {pair[1].id}"
        compared = compare(sides[0], sides[1], assumed=("all",))
        if compared.verdict != "alike":
            why = "; ".join(reason.text for reason in compared.reasons) or "they need normalising"
            raise UsageError(f"{where}: not alike: {why}")
        before, after = map(of_instance, sides)
        if before is None or after is None:
            raise UsageError(f"{where}: it is not known of how many GPUs they are")
        values.append((before, after))
    mean_before = statistics.fmean(before for before, _ in values)
    mean_after = statistics.fmean(after for _, after in values)
    change = mean_after - mean_before
    half_width = mean_half_width([after - before for before, after in values], CONFIDENCE)
    has_interval = math.isfinite(half_width)  # one pair has none
    return Observation(
        quantity=quantity,  # type: ignore[arg-type]
        unit="tok/s" if quantity == "output_throughput" else "ms",
        before=mean_before, after=mean_after, change=change, pairs=len(pairs),
        low=change - half_width if has_interval else None,
        high=change + half_width if has_interval else None,
        runs=tuple(run.source for pair in pairs for run in pair),
        digests=tuple(_digest(run) for pair in pairs for run in pair),
    )  # fmt: skip


# Differences of the predicted from the observed change, relative to the observed one.
TOLERANCE = 0.15  # the most if the prediction explains the observation and neither has an interval
MOST_OFF = 3.0  # beyond it the observed change is near 0, and the relative difference says nothing
NOT_OBSERVED, NOT_PREDICTED = "not observed yet", "no prediction"


@dataclass(frozen=True)
class LedgerLine:
    """What a reader sees of a row in one line: a prediction beside an observation of the same quantity and
    unit, or one of them alone. blind: whether the prediction was written before the observation"""

    row: str
    prediction: Prediction | None
    observation: Observation | None
    blind: bool = False

    @property
    def quantity(self) -> str:
        return next(entry.quantity for entry in (self.prediction, self.observation) if entry)

    @property
    def unit(self) -> str:
        return next(entry.unit for entry in (self.prediction, self.observation) if entry)

    @property
    def method(self) -> str:
        return self.prediction.method if self.prediction else "none"

    @property
    def difference(self) -> float | None:
        """The predicted less the observed change."""
        change = self.prediction.change if self.prediction else None
        return None if change is None or self.observation is None else change - self.observation.change

    @property
    def off(self) -> float | None:
        """The difference relative to the observed change; None if that change is near 0."""
        observed = self.observation.change if self.observation else 0.0
        if self.difference is None or not observed or abs(self.difference) > MOST_OFF * abs(observed):
            return None
        return self.difference / observed

    @property
    def off_text(self) -> str:
        """`off` in per cent, or the difference if the observed change is near 0."""
        if self.off is not None:
            return f"{100 * self.off:+.0f} %"
        return ranged(self.difference, None, None, "+.3g", f" {unit_text(self.unit)}")

    @property
    def verdict(self) -> str:
        """Whether the prediction explains the observation, in the words that `serving ledger` explains."""
        predicted, seen = self.prediction, self.observation
        if predicted is None or seen is None:
            return NOT_OBSERVED if seen is None else NOT_PREDICTED
        low, high = _interval(predicted)
        seen_low, seen_high = _interval(seen)
        if predicted.method == "bound":
            return "bound holds" if low <= seen.change <= high else "bound broken"
        if seen.pairs == 1 or (seen_low <= 0 <= seen_high and seen_low < seen_high):
            return "not resolved"
        if predicted.change is None:  # its interval has no ends, so it would hold whatever was observed
            return "missed"
        if low == high and seen_low == seen_high:
            return "explained" if abs(low - seen_low) <= TOLERANCE * abs(seen_low) else "missed"
        return "explained" if low <= seen_high and seen_low <= high else "missed"


def _interval(entry: Prediction | Observation) -> tuple[float, float]:
    """The ends of the 90 % interval. Without one both are the change itself; an open end is infinite."""
    low, high = entry.low, entry.high
    if low is None:
        low = -math.inf if entry.change is None else entry.change
    if high is None:
        high = math.inf if entry.change is None else entry.change
    return low, high


def ledger_lines(row: LedgerRow) -> list[LedgerLine]:
    """Each observation beside each prediction of its quantity, then the predictions without observation."""
    lines: list[LedgerLine] = []
    unobserved = list(row.predictions)
    for seen in row.observations:
        kind = (seen.observation.quantity, seen.observation.unit)
        of_kind = [one for one in row.predictions if (one.prediction.quantity, one.prediction.unit) == kind]
        for entry in of_kind:
            is_blind = bool(entry.at) and entry.at < seen.at
            lines.append(LedgerLine(row.id, entry.prediction, seen.observation, is_blind))
        if not of_kind:
            lines.append(LedgerLine(row.id, None, seen.observation))
        unobserved = [entry for entry in unobserved if entry not in of_kind]
    return lines + [LedgerLine(row.id, entry.prediction, None) for entry in unobserved]


def explanations(rows: Sequence[LedgerRow]) -> dict[str, list[str]]:
    """Each text once, with the names of its rows."""
    by_text: dict[str, list[str]] = {}
    for row in rows:
        texts = []
        for entry in row.explanations:
            texts.append(entry.text + (f" (shown by {', '.join(entry.evidence)})" if entry.evidence else ""))
        for observed in row.observations:
            if assumed := ", ".join(observed.observation.assumed):
                texts.append(f"taken to be alike without being said: {assumed}")
        for text in dict.fromkeys(texts):
            by_text.setdefault(text, []).append(row.id)
    return by_text
