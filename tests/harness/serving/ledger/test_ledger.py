"""The ledger: nothing in it can be altered or back-dated, and what it says of the published points."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from harness.cli.serving import serving
from harness.cli.serving.ledger import print_ledgers
from harness.errors import HarnessError, UsageError
from harness.serving.ledger.bounds import least_share, most_worth, saved_per_call_us
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
from harness.serving.ledger.prediction import KernelChange, Prediction
from harness.serving.ledger.published import published_rows
from harness.serving.ledger.residuals import residuals, verdict


def prediction(change=-8.0, low=-9.0, high=-7.0, **more):
    return Prediction(quantity="itl", unit="ms", method="replay", change=change, low=low, high=high, **more)


def observation(change=-8.2, low=-9.1, high=-7.3, before=64.0):
    return Observation(
        quantity="itl", unit="ms", before=before, after=before + change, change=change, low=low, high=high
    )


def ledger(path, *, observe_first=False):
    lines = [
        ChangeEntry(row="a", changes=(KernelChange(op="mla_decode", factor=2.0),), setting=Setting()),
        PredictionEntry(row="a", prediction=prediction()),
        ObservationEntry(row="a", observation=observation()),
    ]
    if observe_first:
        lines[1:] = lines[:0:-1]
    return [append(path, line) for line in lines]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "ledger.jsonl"
    written = ledger(path)
    assert read(path) == written
    [row] = rows(read(path))
    assert row.changes[0].op == "mla_decode" and len(row.predictions) == len(row.observations) == 1


@pytest.mark.parametrize("line", [0, 1, 2])
def test_an_altered_line_is_found(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    ledger(path)
    lines = path.read_text().splitlines()
    document = json.loads(lines[line])
    document["row"] = "b"
    lines[line] = json.dumps(document)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=f"line {line + 1}: altered"):
        read(path)


def test_a_line_taken_out_put_in_or_moved_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger(path)
    lines = path.read_text().splitlines(keepends=True)
    for wrong in (lines[:1] + lines[2:], [lines[0], lines[2], lines[1]], [*lines, lines[1]]):
        path.write_text("".join(wrong))
        with pytest.raises(UsageError, match="altered, or a line before it was taken out"):
            read(path)


def test_nothing_is_added_to_a_broken_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger(path)
    path.write_text(path.read_text().replace("mla_decode", "fused_moe"))
    before = path.read_bytes()
    with pytest.raises(UsageError, match="altered"):
        append(path, ExplanationEntry(row="a", text="..."))
    assert path.read_bytes() == before


def test_a_line_may_not_be_dated_back(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger(path)
    append(path, ExplanationEntry(row="a", text="late", at="2001-01-01T00:00:00+00:00"))
    with pytest.raises(UsageError, match="dated 2001"):
        read(path)


def test_a_line_may_not_be_of_the_future(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger(path)
    append(path, ExplanationEntry(row="a", text="early", at="2999-01-01T00:00:00+00:00"))
    with pytest.raises(UsageError, match=r"line 4: dated 2999-.*, which is yet to come"):
        read(path)


def test_a_line_without_its_newline_is_not_written_over(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger(path)
    path.write_bytes(path.read_bytes()[:-1])
    for what in (read, lambda path: append(path, ExplanationEntry(row="a", text="..."))):
        with pytest.raises(UsageError, match="line 3: it has lost its newline"):
            what(path)


def test_a_change_is_after_less_before():
    with pytest.raises(ValueError, match="change -3 is not 8 - 10"):
        Observation(quantity="tpot", unit="ms", before=10.0, after=8.0, change=-3.0)


def forged(lines: list[dict]) -> str:
    """A chain whose hashes were made anew."""
    previous = START
    for line in lines:
        line["previous"] = previous
        previous = line["digest"] = digest(line)
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def test_a_seal_shows_what_a_chain_without_a_key_cannot(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger(path)
    text = path.read_text()
    sealed = seal(path)
    assert require_sealed(path, sealed) == 0
    append(path, ExplanationEntry(row="a", text="..."))
    assert require_sealed(path, sealed) == 1

    lines = [json.loads(line) for line in text.splitlines()]
    lines[1]["prediction"]["change"] = -5.0
    path.write_text(forged(lines))
    assert read(path)[1].prediction.change == -5.0  # nothing is wrong with the chain
    with pytest.raises(HarnessError, match="its first 3 lines are not those that were sealed"):
        require_sealed(path, sealed)

    for cut, left in ((text[: text.rindex('{"row"')], 2), ("", 0)):
        path.write_text(cut)
        assert len(read(path)) == left
        with pytest.raises(HarnessError, match=f"has {left} lines, 3 were sealed: its end was cut off"):
            require_sealed(path, sealed)
    with pytest.raises(UsageError, match="no line to seal"):
        seal(path)
    for bad in ("", "3", "0:" + "a" * 64, "3:abc"):
        with pytest.raises(UsageError, match="it is LINES:DIGEST"):
            require_sealed(path, bad)


def test_sealing_by_command(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger(path)

    def run(*words: str):
        return CliRunner().invoke(serving, ["ledger", *words])

    done = run(str(path), "--seal")
    assert done.exit_code == 0 and done.stdout == f"{seal(path)}  {path}\n"
    done = run(str(path), "--sealed", seal(path))
    assert done.exit_code == 0 and done.stdout == f"{path}: as it was sealed, and 0 lines since\n"
    assert isinstance(run("--seal").exception, UsageError)
    for more in (("--json", "-"), ("--sealed", seal(path))):
        assert "give one of them" in str(run(str(path), "--seal", *more).exception)
    other = run(str(path), "--sealed", "3:" + "0" * 64).exception
    assert isinstance(other, HarnessError) and not isinstance(other, UsageError)


def test_a_line_that_a_kill_broke_off_is_left_out_and_written_over(tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = ledger(path)
    for cut in range(1, 60, 7):
        path.write_text(path.read_text() + whole[1].model_dump_json()[:cut])
        assert read(path)[:3] == whole
        append(path, ExplanationEntry(row="a", text=f"after {cut}"))
    assert len(read(path)) == 3 + 9


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": 1}\n', "[\n]\n", "tpot,ttft\n1,2\n", "\n"])
def test_another_kind_of_file_is_no_empty_ledger_and_nothing_is_added_to_it(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    for what in (read, seal, lambda path: append(path, ExplanationEntry(row="a", text="..."))):
        with pytest.raises(UsageError, match=r"results\.json is no ledger"):
            what(path)
    assert path.read_text() == text


def test_text_that_is_none_of_ours(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"row": 3, "kind": "observation"}\n')
    with pytest.raises(UsageError, match="line 1"):
        read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        read(path)


def test_blind_is_who_was_written_first(tmp_path):
    first = rows(_timed(ledger(tmp_path / "a")))[0]
    late = rows(_timed(ledger(tmp_path / "b", observe_first=True)))[0]
    assert residuals(first)[0].blind and not residuals(late)[0].blind


def test_a_prediction_made_again_after_the_observation_does_not_count(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger(path)
    append(path, PredictionEntry(row="a", prediction=prediction(change=-8.2)))
    [one] = residuals(rows(_timed(read(path)))[0])
    assert one.predicted == -8.0 and one.residual == pytest.approx(-0.2)


def _timed(entries):
    """With times apart: written within a millisecond they may be equal."""
    return [entry.model_copy(update={"at": f"2026-01-01T00:00:0{i}"}) for i, entry in enumerate(entries)]


@pytest.mark.parametrize(
    ("predicted", "observed", "expected"),
    [
        (prediction(), observation(), "explained"),
        (prediction(), observation(-6.0, -6.9, -5.1), "missed"),
        (prediction(), observation(8.0, 7.0, 9.0), "missed"),
        (prediction(), observation(-0.4, -1.0, 0.2), "not resolved"),
        (prediction(-8.0, None, None), observation(-9.0, None, None), "explained"),
        (prediction(-8.0, None, None), observation(-9.5, None, None), "missed"),
        (prediction(-1.0, None, None), observation(-1.0, None, None), "not resolved"),
        (prediction(None, None, None), observation(), "missed"),
    ],
)
def test_verdicts(predicted, observed, expected):
    assert verdict(predicted, observed) == expected


def test_a_bound_holds_or_is_broken():
    bound = Prediction(quantity="itl", unit="ms", method="bound", low=-30.0, high=0.0)
    assert verdict(bound, observation(-29.0, None, None)) == "bound holds"
    assert verdict(bound, observation(-31.0, None, None)) == "bound broken"


def test_amdahl_both_ways():
    assert least_share(53.19, 28.37, 3.0) == pytest.approx(0.70, abs=0.005)
    assert least_share(53.19, 28.37, 2.0) == pytest.approx(0.93, abs=0.005)
    for share, factor in ((0.3, 4.0), (0.9, 1.5)):
        after = (1 - share) + share / factor
        assert least_share(1.0, after, factor) == pytest.approx(share)
        assert after > 1 / most_worth(share)
    assert most_worth(1.0) == float("inf")
    for wrong in ((1.0, 1.0, 1.0), (0.0, 1.0, 2.0), (1.0, 1.0, -2.0)):
        with pytest.raises(UsageError):
            least_share(*wrong)


def test_the_published_points():
    found = {row.id: row for row in published_rows()}
    saved = {
        c: saved_per_call_us(o.before, o.after, 61)
        for c in (4, 8, 16, 32)
        for o in [found[f"aiter-1930 c={c}"].observations[0].observation]
    }
    assert saved == pytest.approx({4: 110.0, 8: 190.7, 16: 267.9, 32: 201.6}, abs=0.1)
    [c4] = residuals(found["aiter-1930 c=4"])
    [c16] = residuals(found["aiter-1930 c=16"])
    assert (c4.verdict, c16.verdict) == ("explained", "missed") and not c4.blind
    joint = {h.of: h.verdict for h in residuals(found["aiter-sglang044-prefill prefill"])}
    assert joint == {
        "fused_moe": "bound holds",
        "block_scale_gemm": "bound broken",
        "mha_prefill": "bound holds",
    }


def test_the_table_and_its_json(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    ledger(path)
    print_ledgers([str(path)])
    text = capsys.readouterr().out
    assert "64 -> 55.8 ms, -8.2 ms (-9.1..-7.3)" in text and "explained" in text and "replay: 1 expl" in text
    print_ledgers([str(path)], "-")
    document = json.loads(capsys.readouterr().out)
    assert document["held"][0]["residual"] == pytest.approx(-0.2)
    with pytest.raises(UsageError, match="no such ledger"):
        print_ledgers([str(tmp_path / "none.jsonl")])
