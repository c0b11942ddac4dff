"""A ledger: changes of kernels, what was predicted of each, and what serving runs showed.

It is a file of JSON lines. Lines are only added, under a lock on the file, so that two commands can write to
one ledger at once. Its rows are shown as text and JSON, with each prediction beside the observation of its
quantity.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, model_validator
from rich.console import Group, RenderableType

from harness.errors import UsageError
from harness.files import JsonLines, whole_lines
from harness.files import append as append_text
from harness.paths import RESULTS, command
from harness.report.fitting_table import table_of
from harness.report.notes import Notes, printed_notes
from harness.report.terminal import COMMAND, whole_line
from harness.report.text import grouped, ranged, significant
from harness.serving.clients.load import beside_each_other, load
from harness.serving.compare import identity
from harness.serving.compare.alike import Quantity, compare, of_instance
from harness.serving.compare.identity import Setting
from harness.serving.compare.settings import beside
from harness.serving.schema import ServingRun, StrictRecord
from harness.statistics.intervals import mean_half_width

NAME = "ledger.jsonl"
OPENING = b'{"row":'  # the beginning of every line
Method = Literal["link", "isolated-warm", "isolated-cold", "serving-mode", "replay", "bound"]
Quantities = Literal["tpot", "itl", "ttft", "e2e", "output_throughput", "decode_step", "prefill", "duration"]
Unit = Literal["ms", "s", "tok/s", "1"]
"""`s` is the unit of a client's whole run (`duration`); `1` that of a quantity whose value before is taken as
1."""
CONFIDENCE = 0.9
RELEASE = re.compile(r"\d+(?:\.\d+)+")
"""The release at the beginning of a version. What follows distinguishes builds of it."""
METRICS: dict[str, tuple[str, ...]] = {name: (name, "mean") for name in ("tpot", "itl", "ttft", "e2e")}
METRICS |= {"output_throughput": ("throughput", "total", "output")}
"""Quantities of a prediction: the metric's name, statistic and kind of tokens."""


class LedgerRecord(StrictRecord):
    """A part of a line. Older ledgers have keys that are not read: hashes of lines, parts of predictions."""

    model_config = ConfigDict(extra="ignore")


def unit_text(unit: str) -> str:
    """The unit in words for a reader."""
    return "x before" if unit == "1" else unit


class KernelChange(LedgerRecord):
    """A change of the speed of one op.

    op:        a name of harness/catalogue/op_classes.json
    part:      for example `qkv_a` or `n=2112 k=7168`; empty: all calls of the op
    factor:    time before / time after, above 1 is faster; None if `saved_us` is given
    saved_us:  time saved in each call
    low, high: 90 % interval of the factor or of the saving
    calls:     calls in a step; None: as in the model
    phase:     of which steps
    source:    where the factor comes from: a run, a pull request
    """

    op: str
    part: str = ""
    factor: float | None = Field(default=None, gt=0)
    saved_us: float | None = None
    low: float | None = None
    high: float | None = None
    calls: int | None = None
    phase: Literal["decode", "prefill", "both"] = "both"
    source: str = ""


class Prediction(LedgerRecord):
    """A predicted change of a quantity.

    of:            the one change that it is for, if it is not for all changes of its row
    low, high:     90 % interval of `change`; for a bound one of them is None
    before, after: None if only the difference or a bound is known
    """

    quantity: Quantities
    unit: Unit
    method: Method
    of: str = ""
    change: float | None = None
    low: float | None = None
    high: float | None = None
    before: float | None = None
    after: float | None = None
    assumptions: tuple[str, ...] = ()


class Observation(LedgerRecord):
    """What serving runs showed before and after a change.

    change:    after - before, in `unit`
    low, high: 90 % interval of the change; None if the source gives none
    runs:      files or folders of the runs
    digests:   of the runs' numbers
    assumed:   names of identity fields that the runs do not tell and the user assumed to be alike
    """

    quantity: Quantities
    unit: Unit
    before: float
    after: float
    change: float
    low: float | None = None
    high: float | None = None
    pairs: int | None = None
    source: str = ""
    runs: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @model_validator(mode="after")
    def is_a_difference(self) -> Observation:
        slack = 1e-3 * max(abs(self.before), abs(self.change))
        if abs(self.change - (self.after - self.before)) > slack:
            raise ValueError(f"change {self.change:g} is not {self.after:g} - {self.before:g}")
        return self


class Line(LedgerRecord):
    """The fields of every line. row: the name of its row; at: the time, ISO 8601, UTC"""

    row: str
    at: str = ""


class ChangeEntry(Line):
    """Opens a row."""

    kind: Literal["change"] = "change"
    changes: tuple[KernelChange, ...]
    setting: Setting


class PredictionEntry(Line):
    """A prediction. command: the one that prints it; empty if it is not known"""

    kind: Literal["prediction"] = "prediction"
    prediction: Prediction
    command: str = ""


class ObservationEntry(Line):
    kind: Literal["observation"] = "observation"
    observation: Observation


class ExplanationEntry(Line):
    """What is known of the difference between prediction and observation: a text, and what shows it."""

    kind: Literal["explanation"] = "explanation"
    text: str
    evidence: tuple[str, ...] = ()


Entry = ChangeEntry | PredictionEntry | ObservationEntry | ExplanationEntry
ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


class LedgerRow(StrictRecord):
    """All lines of one row. ledger: its file"""

    id: str
    changes: tuple[KernelChange, ...] = ()
    setting: Setting = Setting()
    predictions: tuple[PredictionEntry, ...] = ()
    observations: tuple[ObservationEntry, ...] = ()
    explanations: tuple[ExplanationEntry, ...] = ()
    ledger: str = ""


def append(path: Path, *entries: Entry) -> list[Entry]:
    """Adds lines, all or none, with the present time if they have none. Returns them as they are on disk.
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
    """The lines of a ledger, without a last line that a kill cut off. Raises UsageError for a file that is no
    ledger, for a line that cannot be read, and for a whole last line without a newline."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if not OPENING.startswith(data[: len(OPENING)]):
        what = f"no ledger, whose lines begin with {OPENING.decode()} (`serving load` reads clients' files)"
        raise UsageError(f"{path} is {what}")
    entries = list(JsonLines(path, ENTRY.validate_json, lambda _: data).records())
    try:
        ENTRY.validate_json(data[whole_lines(data) :])
    except ValueError:
        return entries
    raise UsageError(f"{path}, line {len(entries) + 1}: its newline is missing; add one, or remove the line")


def rows(entries: Sequence[Entry], ledger: str = "") -> list[LedgerRow]:
    """The ledger's rows, in the order in which they were opened."""
    by_id: dict[str, LedgerRow] = {}
    for entry in entries:
        row = by_id.get(entry.row, LedgerRow(id=entry.row, ledger=ledger))
        if isinstance(entry, ChangeEntry):
            update: dict[str, object] = {"changes": entry.changes, "setting": entry.setting}
        else:
            update = {f"{entry.kind}s": (*getattr(row, f"{entry.kind}s"), entry)}
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
    """Appends an observation for each quantity that was predicted for the row and that the runs have.

    before, after: any client's files, paired in order
    assumed:       see `identity.differences`
    engine:        of all runs, if their files do not tell it

    Other differences between the sides, and what `serving load` finds, are added as explanations. Raises
    UsageError if the runs cannot be paired, are not of the row's setting, or have numbers that `serving load`
    calls wrong.
    """
    identity.require_names("--assume", assumed, ("all", *identity.FIELDS))
    known = {row.id: row for row in rows(read(ledger), str(ledger))}
    if row_id not in known:
        raise UsageError(f"{ledger} has no row {row_id!r}; rows: {', '.join(known) or 'none'}")
    setting = known[row_id].setting
    sides = [[identity.with_engine(run, engine) for name in names for run in load(name)]
             for names in (before, after)]  # fmt: skip
    if len(sides[0]) != len(sides[1]):
        raise UsageError(f"{len(sides[0])} runs before and {len(sides[1])} after: pairs are wanted")
    every = beside_each_other([*sides[0], *sides[1]])
    wrong = {run.id: f.message for run in every for f in reversed(run.findings) if f.severity == "wrong"}
    if wrong:
        first = next(iter(wrong.values()))
        raise UsageError(f"`serving load` finds numbers of {len(wrong)} of these runs wrong: {first}")
    if twice := [f.message for run in every for f in run.findings if f.rule == "repeated"]:
        raise UsageError(f"{twice[0]}; a run counts once")
    for run in every:
        if unlike := identity.differences(setting, run, assumed):
            hint = "" if all(each.is_known for each in unlike) else "; --assume NAME takes it to be alike"
            raise UsageError(f"{run.id} is no run of this row: {identity.text(unlike)}{hint}")
    unsaid = {each.name for run in every for each in identity.differences(setting, run)}
    pairs = list(zip(every[: len(sides[0])], every[len(sides[0]) :], strict=True))
    texts = dict.fromkeys([explanation, *(text for pair in pairs for text in _beside(*pair))])
    predicted = dict.fromkeys(entry.prediction.quantity for entry in known[row_id].predictions)
    seen = [observation(quantity, pairs) for quantity in predicted if quantity in METRICS]
    observed = [entry.observation for entry in known[row_id].observations]
    earlier = {each for one in observed for each in one.digests or one.runs}  # of older ones the runs
    if again := [run.id for run in every if {_digest(run), run.source} & earlier]:
        raise UsageError(f"row {row_id} of {ledger} has {', '.join(again)} already; a run counts once")
    taken = {"assumed": tuple(name for name in identity.FIELDS if name in unsaid)}
    entries = [ObservationEntry(row=row_id, observation=one.model_copy(update=taken)) for one in seen if one]
    if not entries:
        raise UsageError(f"none of {', '.join(predicted)} is in all of these runs")
    append(ledger, *entries, *(ExplanationEntry(row=row_id, text=text) for text in texts if text))


def _digest(run: ServingRun) -> str:
    """A digest of what the run measured, because a file may have moved."""
    return hashlib.sha256(repr((run.totals, run.metrics)).encode()).hexdigest()[:16]


def _beside(before: ServingRun, after: ServingRun) -> Iterator[str]:
    """What differs between a run before and one after, and what `serving load` suspects of them. Raises
    UsageError if they differ in a known field of the identity, except builds of one release."""
    for each in identity.unlike(identity.of_run(before), identity.of_run(after)):
        releases = {release[0] for value in (each.row, each.run) if (release := RELEASE.match(value))}
        if each.is_known and (each.name != "version" or len(releases) > 1):
            raise UsageError(
                f"{before.id} and {after.id} differ in more than the row's change: {each.name} {each.row} "
                f"before, {each.run} after"
            )
        if each.row or each.run:
            yield f"{each.name}: {each.row or 'unknown'} before, {each.run or 'unknown'} after"
    yield from (f"before against after: {line}" for line in beside(before, after))
    for run in (before, after):
        yield from (f"suspect: {each.message}" for each in run.findings if each.severity == "suspect")


def observation(quantity: str, pairs: Sequence[tuple[ServingRun, ServingRun]]) -> Observation | None:
    """The mean difference of the pairs, over the whole instance, with its t-interval; None if a run lacks the
    metric. Raises UsageError if a pair's numbers are of two kinds or of an unknown number of GPUs."""
    values = []
    for pair in pairs:
        sides = [Quantity(run, metric) for run in pair if (metric := run.metric(*METRICS[quantity]))]
        if len(sides) < 2:
            return None
        where = f"{quantity} of {pair[0].id} and {pair[1].id}"
        compared = compare(sides[0], sides[1], ("all",))
        if compared.verdict != "alike":
            why = "; ".join(reason.text for reason in compared.reasons) or "they need normalising"
            raise UsageError(f"{where}: not alike: {why}")
        before, after = map(of_instance, sides)
        if before is None or after is None:
            raise UsageError(f"{where}: it is not known of how many GPUs they are")
        values.append((before, after))
    means = [statistics.fmean(side) for side in zip(*values, strict=True)]
    change = means[1] - means[0]
    half = mean_half_width([after - before for before, after in values], CONFIDENCE)
    low, high = (change - half, change + half) if math.isfinite(half) else (None, None)  # one pair
    return Observation(
        quantity=quantity,  # type: ignore[arg-type]
        unit="tok/s" if quantity == "output_throughput" else "ms",
        before=means[0], after=means[1], change=change, low=low, high=high, pairs=len(pairs),
        runs=tuple(run.source for pair in pairs for run in pair),
        digests=tuple(_digest(run) for pair in pairs for run in pair),
    )  # fmt: skip


TOLERANCE = 0.15  # relative to the observed change, if neither side has an interval
MOST_OFF = 3.0  # relative to it, too: beyond it the observed change is near 0
NOT_OBSERVED, NOT_PREDICTED = "not observed yet", "no prediction"
WORDS: Notes = [
    ("explained", "the 90 % intervals of prediction and observation meet; where neither has one, they differ "
     f"by at most {100 * TOLERANCE:.0f} % of the observed change"),
    ("not resolved", "the interval of the observation holds 0, or it is of one pair and has none"),
    ("off by", "predicted less observed change, as a part of the observed one; in its unit where that is "
     f"over {100 * MOST_OFF:.0f} %, as the observed change is near 0"),
    ("blind", "the prediction was written before the observation"),
    ("bound", "the most that one change alone can give"),
    ("x before", "only the ratio of after to before was published"),
]  # fmt: skip


@dataclass(frozen=True)
class LedgerLine:
    """A prediction beside an observation of the same quantity and unit, or one of them alone.

    blind: whether the prediction was written before the observation
    """

    row: str
    prediction: Prediction | None
    observation: Observation | None
    blind: bool = False

    @property
    def kind(self) -> tuple[str, str]:
        """Quantity and unit."""
        of = self.prediction or self.observation
        return (of.quantity, of.unit) if of else ("", "")

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
        return ranged(self.difference, None, None, "+.3g", f" {unit_text(self.kind[1])}")

    @property
    def verdict(self) -> str:
        """Whether the prediction explains the observation: one of WORDS, or NOT_OBSERVED or NOT_PREDICTED."""
        predicted, seen = self.prediction, self.observation
        if predicted is None or seen is None:
            return NOT_OBSERVED if seen is None else NOT_PREDICTED
        low, high = _interval(predicted)
        seen_low, seen_high = _interval(seen)
        if predicted.method == "bound":
            return "bound holds" if low <= seen.change <= high else "bound broken"
        if seen.pairs == 1 or (seen_low <= 0 <= seen_high and seen_low < seen_high):
            return "not resolved"
        if predicted.change is None:
            return "missed"
        if low == high and seen_low == seen_high:
            return "explained" if abs(low - seen_low) <= TOLERANCE * abs(seen_low) else "missed"
        return "explained" if low <= seen_high and seen_low <= high else "missed"


def _interval(of: Prediction | Observation) -> tuple[float, float]:
    """The ends of the 90 % interval. Without one both are the change itself; an open end is infinite."""
    ends = (-math.inf, math.inf) if of.change is None else (of.change, of.change)
    return (ends[0] if of.low is None else of.low), (ends[1] if of.high is None else of.high)


def ledger_lines(row: LedgerRow) -> list[LedgerLine]:
    """Each observation beside each prediction of its kind, then the predictions without observation."""
    predicted = [(LedgerLine(row.id, entry.prediction, None), entry.at) for entry in row.predictions]
    lines: list[LedgerLine] = []
    for seen in row.observations:
        alone = LedgerLine(row.id, None, seen.observation)
        same = [(line, at) for line, at in predicted if line.kind == alone.kind]
        lines += [replace(line, observation=seen.observation, blind="" < at < seen.at) for line, at in same]
        lines += [] if same else [alone]
    known = {line.kind for line in lines}
    return lines + [line for line, _ in predicted if line.kind not in known]


def as_json(rows: Sequence[LedgerRow]) -> str:
    lines = [
        {"row": line.row, "quantity": line.kind[0], "unit": line.kind[1], "method": line.method,
         "off": line.off, "verdict": line.verdict, "blind": line.blind}
        for row in rows for line in ledger_lines(row)
    ]  # fmt: skip
    document = {"rows": [row.model_dump() for row in rows], "lines": lines}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def ledger_text(rows: Sequence[LedgerRow], each: bool) -> RenderableType:
    """How many predictions of each method held; then the rows of each ledger, or only their number."""
    by_ledger = grouped(rows, lambda row: row.ledger)
    parts: list[RenderableType] = [_summary([line for row in rows for line in ledger_lines(row)]), ""]
    for ledger, own in by_ledger.items() if each else ():
        parts += [ledger, ""]
        for row in own:
            changes = ", ".join(map(_change, row.changes))
            parts += [f"{row.id}: {changes}", table_of([*_cells(row)]), ""]
        for text, ids in explanations(own).items():
            others = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
            parts += [f"{ids[0]}{others}: {text}", ""]
    if not each:
        parts += [table_of([{"ledger": name, "rows": len(own)} for name, own in by_ledger.items()]), ""]
        one = command("serving", "ledger", next(iter(by_ledger), "LEDGER"))
        parts += ["the rows of one:", whole_line(COMMAND + one), ""]
    return Group(*parts, printed_notes(WORDS if each else WORDS[:3]))


def explanations(rows: Sequence[LedgerRow]) -> dict[str, list[str]]:
    """Each text once, with the names of its rows."""
    texts: dict[str, dict[str, None]] = {}
    for row in rows:
        for one in row.explanations:
            evidence = f" (shown by {', '.join(one.evidence)})" if one.evidence else ""
            texts.setdefault(one.text + evidence, {})[row.id] = None
        for assumed in filter(None, (", ".join(entry.observation.assumed) for entry in row.observations)):
            texts.setdefault(f"taken to be alike without being said: {assumed}", {})[row.id] = None
    return {text: list(ids) for text, ids in texts.items()}


def _summary(lines: Sequence[LedgerLine]) -> RenderableType:
    """For each method: how many of each verdict, and how far off it was if the change is resolved."""
    judged = [line for line in lines if line.prediction and line.observation]
    if not judged:
        return "no prediction has an observation yet"
    verdicts, rows = dict.fromkeys(line.verdict for line in judged), []
    for method, own in grouped(judged, lambda line: line.method).items():
        counts = Counter(line.verdict for line in own)
        off = [abs(line.off) for line in own if line.off is not None and line.verdict != "not resolved"]
        far = {f"off by, {name}": f"{100 * of(off):.0f} %" if off else ""
               for name, of in (("median", statistics.median), ("most", max))}  # fmt: skip
        rows.append({"method": method, **{verdict: counts[verdict] or "" for verdict in verdicts}, **far})
    return table_of(rows)


def _cells(row: LedgerRow) -> Iterator[dict[str, str]]:
    """Each observation, and below it the predictions of its quantity."""

    def cells(*of: str) -> dict[str, str]:
        names = ("quantity", "method", "change", "verdict", "off by", "before and after")
        return dict(zip(names, of, strict=True))

    lines, above = ledger_lines(row), None
    if not lines:
        yield cells("neither predicted nor observed yet", "", "", "", "", "")
    for line in lines:
        seen, predicted, (quantity, unit) = line.observation, line.prediction, line.kind
        if seen and seen is not above:
            sides = f"{significant(seen.before, 4)} -> {significant(seen.after, 4)} {unit_text(unit)}"
            yield cells(quantity, "observed", _value(seen), "" if predicted else line.verdict, "", sides)
        if predicted:
            method = line.method + (f": {predicted.of} alone" if predicted.of else "")
            told = line.verdict + (", blind" if line.blind else "")
            yield cells("" if seen else quantity, method, _value(predicted), told, line.off_text, "")
        above = seen


def _change(change: KernelChange) -> str:
    by = "" if change.factor is None else f"{change.factor:g}x"
    by = by if change.saved_us is None else f"saves {change.saved_us:g} us a call"
    return " ".join(filter(None, [change.op, change.part, by]))


def _value(of: Prediction | Observation) -> str:
    """`-8 ms (-9 to -7)`"""
    return ranged(of.change, of.low, of.high, "+.3g", f" {unit_text(of.unit)}")
