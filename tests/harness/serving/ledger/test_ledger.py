"""The ledger: nothing in it can be altered or back-dated, and what it says of the published points."""

import json
import shlex

import pytest
from click.testing import CliRunner

from harness.cli.serving import serving
from harness.cli.serving.ledger import print_ledgers
from harness.errors import HarnessError, UsageError
from harness.paths import RESULTS, ROOT
from harness.serving.ledger import published
from harness.serving.ledger.bounds import least_share, most_worth, saved_per_call_us
from harness.serving.ledger.index import known_rows
from harness.serving.ledger.ledger import (
    START,
    ChangeEntry,
    ExplanationEntry,
    Observation,
    ObservationEntry,
    PredictionEntry,
    Setting,
    append,
    digest,
    read,
    require_sealed,
    rows,
    seal,
)
from harness.serving.ledger.link_predictions import STORED, StoredPrediction, stored
from harness.serving.ledger.prediction import KernelChange, Prediction
from harness.serving.ledger.published import published_changes, published_rows
from harness.serving.ledger.report import published_summary
from harness.serving.ledger.residuals import residuals, verdict


def prediction(change=-8.0, low=-9.0, high=-7.0, **more):
    return Prediction(quantity="itl", unit="ms", method="replay", change=change, low=low, high=high, **more)


def observation(change=-8.2, low=-9.1, high=-7.3, before=64.0):
    return Observation(
        quantity="itl", unit="ms", before=before, after=before + change, change=change, low=low, high=high
    )


def ledger(path, *, observe_first=False):
    seen = [PredictionEntry(row="a", prediction=prediction()),
            ObservationEntry(row="a", observation=observation())]  # fmt: skip
    change = ChangeEntry(row="a", changes=(KernelChange(op="mla_decode", factor=2.0),), setting=Setting())
    return [append(path, line) for line in (change, *(reversed(seen) if observe_first else seen))]


def note(path, text="...", **more):
    return append(path, ExplanationEntry(row="a", text=text, **more))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "ledger.jsonl"


@pytest.mark.parametrize(("tampered", "says"), [
    (lambda a, b, c: [a.replace("mla_decode", "fused_moe"), b, c], "line 1: altered"),
    (lambda a, b, c: [a, b, c.replace("55.8", "55.9").replace("-8.2", "-8.1")], "line 3: altered"),
    (lambda a, b, c: [a, c], "altered, or a line before it was taken out"),
    (lambda a, b, c: [a, b, c, b], "altered, or a line before it was taken out"),
    (lambda a, b, c: [a, b, c[:-1]], "line 3: it has lost its newline"),
    (lambda a, b, c: ['{"row": 3, "kind": "observation"}\n'], "line 1"),
])  # fmt: skip
def test_what_was_altered_is_found_and_nothing_is_added_to_it(path, tampered, says):
    written = ledger(path)
    assert read(path) == written
    text = "".join(tampered(*path.read_text().splitlines(keepends=True)))
    path.write_text(text)
    for what in (read, note):
        with pytest.raises(UsageError, match=says):
            what(path)
    assert path.read_text() == text


@pytest.mark.parametrize(("at", "says"), [("2001", "dated 2001"), ("2999", "dated 2999-.* is yet to come")])
def test_a_line_is_of_the_time_that_it_was_written(path, at, says):
    ledger(path)
    note(path, at=f"{at}-01-01T00:00:00+00:00")
    with pytest.raises(UsageError, match=f"line 4: {says}"):
        read(path)


def test_a_line_that_a_kill_broke_off_is_left_out_and_written_over(path):
    whole = ledger(path)
    for cut in (1, 30, 59):
        path.write_text(path.read_text() + whole[1].model_dump_json()[:cut])
        assert read(path)[:3] == whole
        note(path, f"after {cut}")
    assert len(read(path)) == 3 + 3


def test_a_seal_shows_what_a_chain_without_a_key_cannot(path):
    ledger(path)
    text, sealed = path.read_text(), seal(path)
    note(path)
    done = CliRunner().invoke(serving, ["ledger", str(path), "--sealed", sealed])
    assert done.exit_code == 0 and done.stdout == f"{path}: as it was sealed, and 1 lines since\n"
    previous, forged = START, []
    for line in map(json.loads, text.replace('"change":-8.0', '"change":-5.0').splitlines()):
        line["previous"] = previous
        previous = line["digest"] = digest(line)
        forged.append(json.dumps(line) + "\n")
    path.write_text("".join(forged))
    assert read(path)[1].prediction.change == -5.0  # nothing is wrong with the chain
    with pytest.raises(HarnessError, match="its first 3 lines are not those that were sealed"):
        require_sealed(path, sealed)
    path.write_text(text[: text.rindex('{"row"')])
    with pytest.raises(HarnessError, match="has 2 lines, 3 were sealed: its end was cut off"):
        require_sealed(path, sealed)


def timed(entries):
    """With times apart: written within a millisecond they may be equal."""
    return [entry.model_copy(update={"at": f"2026-01-01T00:00:0{i}"}) for i, entry in enumerate(entries)]


def test_only_what_was_predicted_before_is_blind_and_counts(tmp_path):
    ledger(tmp_path / "a")
    append(tmp_path / "a", PredictionEntry(row="a", prediction=prediction(change=-8.2)))
    [one] = residuals(rows(timed(read(tmp_path / "a")))[0])
    assert one.blind and one.predicted == -8.0 and one.residual == pytest.approx(-0.2)
    tpot = {"quantity": "tpot"}
    seen = ObservationEntry(row="a", observation=observation().model_copy(update=tpot))
    after = PredictionEntry(row="a", prediction=prediction().model_copy(update=tpot))
    found = residuals(rows(timed([*read(tmp_path / "a"), seen, after]))[0])
    assert [(one.quantity, one.blind) for one in found] == [("itl", True), ("tpot", False)]
    late = ledger(tmp_path / "b", observe_first=True)
    at_once = [entry.model_copy(update={"at": "2026-01-01"}) for entry in late]
    undated = [e.model_copy(update={"at": "" if e.kind == "prediction" else e.at}) for e in at_once]
    assert not any(residuals(rows(entries)[0])[0].blind for entries in (timed(late), at_once, undated))
    Observation(quantity="tpot", unit="ms", before=70.0, after=69.9, change=-0.13)  # rounded each by itself
    with pytest.raises(ValueError, match="change -3 is not 8 - 10"):
        Observation(quantity="tpot", unit="ms", before=10.0, after=8.0, change=-3.0)


BOUND = Prediction(quantity="itl", unit="ms", method="bound", low=-30.0, high=0.0)


@pytest.mark.parametrize(("predicted", "observed", "expected"), [
    (prediction(), observation(), "explained"),
    (prediction(), observation(-6.0, -6.9, -5.1), "missed"),
    (prediction(), observation(8.0, 7.0, 9.0), "missed"),
    (prediction(), observation(-0.4, -1.0, 0.2), "not resolved"),
    (prediction(-8.0, None, None), observation(-9.0, None, None), "explained"),
    (prediction(-8.0, None, None), observation(-9.5, None, None), "missed"),
    (prediction(-1.0, None, None), observation(-1.0, None, None), "not resolved"),
    (prediction(None, None, None), observation(), "missed"),
    (BOUND, observation(-29.0, None, None), "bound holds"),
    (BOUND, observation(-31.0, None, None), "bound broken"),
])  # fmt: skip
def test_verdicts(predicted, observed, expected):
    assert verdict(predicted, observed) == expected


def test_amdahl_both_ways():
    for factor, share in ((3.0, 0.70), (2.0, 0.93)):
        assert least_share(53.19, 28.37, factor) == pytest.approx(share, abs=0.005)
    assert least_share(1.0, 0.9 / 1.5 + 0.1, 1.5) == pytest.approx(0.9)
    assert (most_worth(0.75), most_worth(1.0)) == (4.0, float("inf"))
    for wrong in ((1.0, 1.0, 1.0), (0.0, 1.0, 2.0), (1.0, 1.0, -2.0)):
        with pytest.raises(UsageError):
            least_share(*wrong)


def test_the_published_points():
    found = {row.id: row for row in published_rows()}
    points = {c: found[f"aiter-1930 c={c}"].observations[0].observation for c in (4, 8, 16, 32)}
    saved = {c: saved_per_call_us(point.before, point.after, 61) for c, point in points.items()}
    assert saved == pytest.approx({4: 110.0, 8: 190.7, 16: 267.9, 32: 201.6}, abs=0.1)
    [c4], [c16] = (residuals(found[f"aiter-1930 c={c}"]) for c in (4, 16))
    assert (c4.verdict, c16.verdict) == ("explained", "missed") and not c4.blind
    joint = {one.of: one.verdict for one in residuals(found["aiter-sglang044-prefill prefill"])}
    held, broken = "bound holds", "bound broken"
    assert joint == {"fused_moe": held, "block_scale_gemm": broken, "mha_prefill": held}
    grouped = found["trtllm-blog3 grouped-gemm"]  # a faster kernel bounds a rate from above
    [bound] = residuals(grouped)
    assert (bound.low, bound.verdict) == (0.0, held) and bound.high == pytest.approx(0.13)
    # 1 - 1/1.013 of the time was saved, 1 - 1/1.13 of the kernel's
    assert "share of at least 11%" in grouped.explanations[0].text
    [summary] = published_summary(list(found.values()))
    assert summary in (ROOT / "docs" / "serving-link.md").read_text()


def test_what_is_written_of_a_row(path, capsys):
    """What is printed of one: cli/transcripts."""
    ledger(path)
    print_ledgers([str(path)], "-")
    document = json.loads(capsys.readouterr().out)
    assert document["held"][0]["residual"] == pytest.approx(-0.2)


def test_without_names_they_are_all_that_are_committed():
    committed = {str(file.relative_to(ROOT)) for file in RESULTS.rglob("ledger.jsonl")}
    assert committed < {row.ledger for row in known_rows(())}


# Published changes: each is predicted by the command beside its prediction, or says what it lacks


def test_each_publication_says_what_it_lacks():
    changes, rows = published_changes(), published_rows()
    assert len({row.id for row in rows}) == len(rows) >= 25
    assert len({change.source for change in changes}) >= 12
    assert all(change.lacks for change in changes)
    assert {change.row(p) for change in changes if change.link for p in change.points} == set(stored())


def of_document(document, point):
    """A point's prediction in `serving link --json`: of a ratio as a part of the link's own value before."""
    [workload] = document["workloads"]
    change = next(one for one in workload["changes"] if one["quantity"] == point.quantity)
    made = Prediction(**change | {"parts": (), "uncertainty": ()})
    whole, unit = (made.before, "1") if point.unit == "1" else (1.0, made.unit)
    values = {name: getattr(made, name) for name in ("change", "low", "high", "before", "after")}
    rounded = {name: float(f"{value / whole:.6g}") for name, value in values.items() if value is not None}
    return made.model_copy(update={**rounded, "unit": unit})


def test_the_model_still_predicts_what_is_stored(request, here):
    """--golden=write stores what it predicts of all points."""
    anew, made = request.config.getoption("golden") == "write", []
    for change, point in [(c, p) for c in published_changes() if c.link for p in c.points]:
        row, command = change.row(point), change.command(point)
        if anew or row in ("sglang-5432", "aiter-1930 c=4"):
            found = of_document(json.loads(here(*shlex.split(command)[3:]).stdout), point)
            made.append(StoredPrediction(row=row, command=command, prediction=found))
    if anew:
        document = json.loads(STORED.read_text()) | {"predictions": [entry.model_dump() for entry in made]}
        STORED.write_text(json.dumps(document, indent=1) + "\n")
    kept = stored()
    for entry in made:
        assert entry.command == kept[entry.row].command
        for name in ("change", "low", "high", "before"):
            before = getattr(kept[entry.row].prediction, name)
            assert getattr(entry.prediction, name) == pytest.approx(before, rel=1e-4)


def test_a_prediction_of_another_command_is_refused(monkeypatch):
    known = stored()
    other = known["sglang-5432"].model_copy(update={"command": "python -m harness serving link"})
    monkeypatch.setattr(published, "stored", lambda: known | {"sglang-5432": other})
    with pytest.raises(UsageError, match=r"no prediction of sglang-5432 .* --golden=write"):
        published_rows()
