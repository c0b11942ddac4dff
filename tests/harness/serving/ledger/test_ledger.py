"""The ledger: lines are whole though another process writes, older ledgers load, what counts as explained."""

import json
import multiprocessing
import shlex

import pytest

from harness.cli.serving.results import print_ledgers
from harness.errors import UsageError
from harness.paths import PUBLISHED, RESULTS, ROOT
from harness.serving.ledger import (
    ENTRY,
    ChangeEntry,
    ExplanationEntry,
    KernelChange,
    LedgerLine,
    Observation,
    ObservationEntry,
    Prediction,
    PredictionEntry,
    Setting,
    append,
    known_rows,
    ledger_lines,
    read,
    rows,
)

CHANGE = ChangeEntry(row="a", changes=(KernelChange(op="mla_decode", factor=2.0),), setting=Setting())


def prediction(change=-8.0, low=-9.0, high=-7.0, **more):
    return Prediction(quantity="itl", unit="ms", method="replay", change=change, low=low, high=high, **more)


def observation(change=-8.2, low=-9.1, high=-7.3):
    return Observation(
        quantity="itl", unit="ms", before=64.0, after=64.0 + change, change=change, low=low, high=high
    )


PREDICTED = PredictionEntry(row="a", prediction=prediction())
OBSERVED = ObservationEntry(row="a", observation=observation())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "ledger.jsonl"


def add_notes(path, name, start):
    start.wait()
    for number in range(20):
        append(path, ExplanationEntry(row=name, text=f"{name} {number}"))


def test_two_processes_can_add_lines_at_once(path):
    context = multiprocessing.get_context("fork")
    start = context.Event()
    writers = [context.Process(target=add_notes, args=(path, name, start)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    start.set()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    for row in rows(read(path)):
        assert [entry.text for entry in row.explanations] == [f"{row.id} {number}" for number in range(20)]
    assert len(read(path)) == 40


def test_a_row_is_opened_once_and_of_several_lines_none_is_written_then(path):
    written = append(path, CHANGE, PREDICTED)
    assert read(path) == written and all(entry.at for entry in written)
    with pytest.raises(UsageError, match="has a row 'a' already; use another --ledger FILE"):
        append(path, ExplanationEntry(row="b", text=""), CHANGE)
    assert read(path) == written


def test_a_line_that_a_kill_cut_off_is_left_out_and_written_over(path):
    [whole] = append(path, CHANGE)
    for cut in (1, 30, 59):
        path.write_text(path.read_text() + whole.model_dump_json()[:cut])
        assert read(path)[0] == whole
        append(path, ExplanationEntry(row="a", text=f"after {cut}"))
    assert len(read(path)) == 1 + 3


@pytest.mark.parametrize(("text", "says"), [
    ('{"runs": []}\n', "is no ledger, whose lines begin with"),
    ('{"row": "a"}\n', "line 1: "),
    ('{"row":"a","kind":"weather"}\n', "line 1: "),
    ('{"row":"a","kind":"explanation","text":"x"}', "line 1: its newline is missing"),
    ('{"row":"a","kind":"observation","observation":{"quantity":"tpot","unit":"ms","before":10,"after":8,'
     '"change":-3}}\n', "line 1: .*change -3 is not 8 - 10"),
])  # fmt: skip
def test_a_file_that_is_no_ledger_is_neither_read_nor_added_to(path, text, says):
    path.parent.mkdir()
    path.write_text(text)
    for use in (lambda: read(path), lambda: append(path, CHANGE)):
        with pytest.raises(UsageError, match=says):
            use()
    assert path.read_text() == text


def test_committed_ledgers_load_and_their_hashes_are_not_read():
    """Those before November 2026 hold hashes and a margin."""
    named = {row.ledger for row in known_rows(())}
    assert named == {str(file.relative_to(ROOT)) for file in RESULTS.rglob("ledger.jsonl")}
    assert len(named) == 14
    text = (RESULTS / "epyc-zen4-2core/serving/cpu-short/ledger.jsonl").read_text().splitlines()[-1]
    assert '"digest":"' in text and '"resolution":' in text
    entry = ENTRY.validate_json(text.replace('"digest":"', '"digest":"0'))
    assert entry == ENTRY.validate_json(text) and "digest" not in entry.model_dump()


def timed(*entries):
    times = [f"2026-01-01T00:00:0{i}" for i in range(len(entries))]
    return rows([entry.model_copy(update={"at": at}) for entry, at in zip(entries, times, strict=True)])


def test_a_prediction_made_before_the_observation_is_blind():
    again = PredictionEntry(row="a", prediction=prediction(change=-8.2))
    first, second = ledger_lines(timed(PREDICTED, OBSERVED, again)[0])
    assert (first.blind, second.blind) == (True, False)
    assert (first.off, second.off) == (pytest.approx(-0.2 / 8.2), 0)
    [line] = ledger_lines(rows([PREDICTED, OBSERVED])[0])  # without times, as published points are
    assert not line.blind
    other = OBSERVED.model_copy(update={"observation": observation().model_copy(update={"quantity": "tpot"})})
    verdicts = [line.verdict for line in ledger_lines(timed(PREDICTED, other)[0])]
    assert verdicts == ["no prediction", "not observed yet"]


ONE_PAIR = observation(-9.5, None, None).model_copy(update={"pairs": 1})
BOUND = Prediction(quantity="itl", unit="ms", method="bound", low=-30.0, high=0.0)


@pytest.mark.parametrize(("predicted", "observed", "expected"), [
    (prediction(), observation(), "explained"),
    (prediction(), observation(-6.0, -6.9, -5.1), "missed"),
    (prediction(), observation(8.0, 7.0, 9.0), "missed"),
    (prediction(), observation(-0.4, -1.0, 0.2), "not resolved"),
    (prediction(), observation(-0.4, -0.5, -0.3), "missed"),  # small, and resolved by its interval
    (prediction(-8.0, None, None), observation(-9.0, None, None), "explained"),
    (prediction(-8.0, None, None), observation(-9.5, None, None), "missed"),
    (prediction(-8.0, None, None), ONE_PAIR, "not resolved"),
    (prediction(None, None, None), observation(), "missed"),
    (prediction(-8.0, None, None), observation(0.0, None, None), "missed"),
    (prediction(0.0, None, None), observation(0.0, None, None), "explained"),
    (BOUND, observation(-29.0, None, None), "bound holds"),
    (BOUND, observation(-31.0, None, None), "bound broken"),
])  # fmt: skip
def test_verdicts(predicted, observed, expected):
    assert LedgerLine("a", predicted, observed).verdict == expected


@pytest.mark.parametrize(("predicted", "observed", "off"), [
    (-8.0, -8.2, "-2 %"), (-8.0, -2.5, "+220 %"), (8.0, -8.0, "-200 %"), (-8.0, -0.01, "-7.99 ms"),
    (-8.0, 0.0, "-8 ms"), (None, -8.2, ""),
])  # fmt: skip
def test_where_the_observed_change_is_near_0_it_is_off_by_a_difference(predicted, observed, off):
    line = LedgerLine("a", prediction(predicted, None, None), observation(observed, None, None))
    assert line.off_text == off and (line.off is None) == ("%" not in off)


def test_what_is_written_of_a_row(path, capsys):
    """The text is in cli/transcripts."""
    append(path, CHANGE, PREDICTED, OBSERVED)
    print_ledgers([str(path)], "-")
    document = json.loads(capsys.readouterr().out)
    assert document["rows"][0]["id"] == "a"
    [line] = document["lines"]
    assert (line["verdict"], line["off"]) == ("explained", pytest.approx(-0.2 / 8.2))


CHANGES = PUBLISHED / "changes" / "ledger.jsonl"


def predicted_now(entry, here):
    """What the command of a published change predicts: of a ratio, as a part of its own value before."""
    document = json.loads(here(*shlex.split(entry.command)[3:]).stdout)
    [workload] = document["workloads"]
    change = next(c for c in workload["changes"] if c["quantity"] == entry.prediction.quantity)
    made = Prediction(**change | {"parts": (), "uncertainty": ()})
    whole, unit = (made.before, "1") if entry.prediction.unit == "1" else (1.0, made.unit)
    names = ("change", "low", "high", "before", "after")
    values = {name: float(f"{getattr(made, name) / whole:.6g}") for name in names}
    return made.model_copy(update=values | {"unit": unit})


def test_published_changes_are_still_predicted_as_they_stand(request, here):
    """--golden=write predicts all of them again."""
    anew, lines = request.config.getoption("golden") == "write", []
    for entry in read(CHANGES):
        fields = entry.model_dump(mode="json", exclude_defaults=True)
        if entry.kind == "prediction" and (anew or entry.row in ("sglang-5432", "aiter-1930 c=4")):
            found = predicted_now(entry, here)
            for name in ("change", "low", "high", "before"):
                kept = getattr(entry.prediction, name)
                assert anew or getattr(found, name) == pytest.approx(kept, rel=1e-4)
            fields["prediction"] = found.model_dump(mode="json", exclude_defaults=True)
        line = {"row": entry.row, "kind": entry.kind, **fields}
        lines.append(json.dumps(line, separators=(",", ":")) + "\n")
    if anew:
        CHANGES.write_text("".join(lines))
