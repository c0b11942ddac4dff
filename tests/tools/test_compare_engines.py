"""The program that compares engines: what it makes, what it leaves when it is stopped, what its page says."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from harness.paths import ROOT
from tools import compare_engines
from tools.engines.journal import Journal, Ranked, Session, Settings
from tools.engines.one_ranking import ENGINES, LOADS, PEERS
from tools.engines.page import page, score

SESSION = Session(
    "2026-11-23 10:00",
    Settings(threads=2, quick=False),
    {"device": "a CPU", "arch": "x86-avx2", "cpus": 2, "os": "Linux"},
    {"Python": "3.11", "torch": "2.13"},
    "0123456789",
)
RANKED = Ranked(
    engine="ours, 20 s",
    load="quiet",
    ranking=0,
    baseline="gemm",
    wall_s=10.0,
    others=0.0,
    seconds={"gemm": 1.0, "gemm again": 1.001, "gemm +2%": 1.02},
    verdicts={"gemm again": "same", "gemm +2%": "slower"},
)


def made(engine: str, load: str, verdicts: list[tuple[str, str]], wall_s: float = 10.0) -> list[Ranked]:
    return [
        replace(
            RANKED,
            engine=engine,
            load=load,
            ranking=ranking,
            wall_s=wall_s,
            verdicts={"gemm again": again, "gemm +2%": slower},
        )
        for ranking, (again, slower) in enumerate(verdicts)
    ]


def test_every_engine_ranks_under_every_load_in_turn():
    places = list(compare_engines.schedule(6))
    assert len(set(places)) == len(places)
    counts = Counter((engine, load) for engine, load, _ in places)
    assert set(counts) == set(itertools.product(ENGINES, LOADS))
    assert {n for (engine, _), n in counts.items() if engine != "pyperf"} == {6}
    assert {n for (engine, _), n in counts.items() if engine == "pyperf"} == {2}
    assert {engine for engine, _, _ in places[: len(ENGINES)]} == set(ENGINES)
    assert {engine for engine, _, _ in compare_engines.schedule(1)} == set(ENGINES)


def test_a_score_counts_false_verdicts_and_what_was_found():
    verdicts = [("same", "slower"), ("faster", "faster"), ("slower", "unclear"), ("same", "same")]
    counted = score("ours, 20 s", made("ours, 20 s", "quiet", verdicts))
    assert counted.rankings == 4
    assert counted.false == (2, 0)  # by the estimates, which are the same each time, none
    assert counted.found == (1, 4)
    assert (counted.wrong, counted.failed) == (1, 0)
    assert counted.net == (1 - 1 - 2) / 4


def test_a_failed_ranking_is_counted_apart():
    failed = replace(RANKED, ranking=1, seconds={}, verdicts={}, error="no memory")
    counted = score("ours, 20 s", [RANKED, failed])
    assert (counted.rankings, counted.failed) == (1, 1)
    assert "ours, 20 s, ranking 2, failed: no memory." in page("it", [SESSION], [RANKED, failed])


@pytest.mark.parametrize(
    ("verdicts", "wall_s", "says"),
    [
        (("same", "slower"), 10.0, "best in truth, +1.00 (do_bench +0.00); within 2 times the fastest"),
        (("same", "slower"), 30.0, "best in truth, +1.00 (do_bench +0.00); NOT within 2 times the fastest"),
        (("same", "unclear"), 9.0, "as good as the best in truth, +0.00"),
        (("same", "faster"), 9.0, "NOT best in truth, -1.00"),
        (("slower", "unclear"), 9.0, "NOT best in truth, -1.00"),
    ],
)
def test_the_page_says_plainly_whether_ours_is_best(verdicts, wall_s, says):
    ranked = made("ours, 20 s", "busy", [verdicts], wall_s) + made(
        "do_bench", "busy", [("faster", "slower")], 6.0
    )
    text = page("it", [SESSION], ranked)
    assert f"Beside a busy loop on each core, ours, 20 s: {says}" in text
    assert "## Quiet" not in text


def test_what_is_there_is_not_made_again(tmp_path, monkeypatch):
    pytest.importorskip("pyperf")

    def ranking(place, settings):
        asked.append(place)
        return replace(RANKED, **dict(zip(("engine", "load", "ranking"), place, strict=True)))

    asked: list[tuple[str, str, int]] = []
    monkeypatch.setattr(compare_engines, "one_ranking", ranking)
    journal = Journal(tmp_path / "engines")
    journal.append(SESSION)
    journal.append(RANKED)
    journal.append(replace(RANKED, load="busy", error="killed"))
    with journal.lines.path.open("a") as file:
        file.write('{"kind": "ranked", "engi')  # a kill came between
    compare_engines.measure(journal, SESSION.settings, 1)
    assert asked == [place for place in compare_engines.schedule(1) if place != RANKED.place]
    sessions, ranked = journal.read()
    assert len(sessions) == 2
    assert len(ranked) == len(ENGINES) * len(LOADS)
    assert not any(r.error for r in ranked)
    compare_engines.measure(journal, SESSION.settings, 1)
    assert len(asked) == len(ranked) - 1
    with pytest.raises(SystemExit, match="other settings"):
        compare_engines.measure(journal, replace(SESSION.settings, threads=1), 2)


def test_a_command_that_fails_leaves_its_last_line():
    code = "import sys; print('first', file=sys.stderr); sys.exit('no such thing')"
    assert compare_engines.run_alone([sys.executable, "-c", code], {}) == "no such thing"
    assert compare_engines.run_alone([sys.executable, "-c", ""], {}) == ""
    assert compare_engines.run_alone([sys.executable, "-c", "raise SystemExit(3)"], {}) == "ended with 3"


@pytest.mark.slow
def test_a_quick_comparison_runs_to_its_end(tmp_path):
    pytest.importorskip("pyperf")
    out = tmp_path / "engines"
    command = [sys.executable, "-m", "tools.compare_engines", "--out", str(out)]
    done = subprocess.run([*command, "--quick"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = (out / "README.md").read_text()
    assert done.stdout == f"{text}\n"
    lines = [json.loads(line) for line in (out / "rankings.jsonl").read_text().splitlines()]
    ranked = [line for line in lines if line["kind"] == "ranked"]
    assert [r["error"] for r in ranked] == [""] * len(ENGINES) * len(LOADS)
    assert all(len(r["verdicts"]) == 2 for r in ranked)
    assert all(peer in text for peer in PEERS)
    again = subprocess.run([*command, "--render"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert (out / "README.md").read_text().split("\n\n")[2:] == text.split("\n\n")[2:]
