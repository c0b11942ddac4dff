"""The sections of experiments and replays: pairs, rejected runs and steps are the records'."""

from __future__ import annotations

import functools
import json
import shlex
import shutil

import pytest

from harness import archive
from harness.errors import UsageError
from harness.page.assemble import assemble
from harness.page.inputs import inputs
from harness.page.serving.experiment import experiment_section
from harness.page.serving.replay import replay_section, replays
from harness.page.written import written_section
from harness.serving.experiment.spec import Experiment, read_experiment
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.ab.pairs import pairs_of
from tests.harness.page.serving.specs import charts, compiled, data, expressions, require_valid
from tests.support.paths import ROOT

FOLDER = ROOT / "results" / "epyc-zen4-2core" / "serving"
REPLAY = FOLDER / "cpu-default" / "stages" / "experts-grouped" / "replay-decode-0.json"


@functools.cache
def committed(name):
    return experiment_section(FOLDER / name)


@pytest.mark.parametrize("name", ["cpu-default", "cpu-short", "cpu-long"])
def test_pairs_are_the_journals(name):
    section = committed(name)
    require_valid(section)
    by_title = {chart.title: chart for chart in charts(section)}
    for journal in sorted((FOLDER / name / "live").iterdir()):
        lines, arm = LiveJournal(journal).lines(), journal.name
        marks = data(by_title[f"{arm} beside base, pair by pair"])
        shown = [(m["before"], m["after"]) for m in marks if m.get("connected") and m["counts"]]
        quantities = ("steady_itl_ms", "mean_ttft_ms", "mean_tpot_ms")
        assert shown == [pair for quantity in quantities for pair in pairs_of(lines, quantity, "base", arm)]


def test_rejected_runs_are_shown_with_their_reason():
    marks = [m for chart in charts(committed("cpu-default")) for m in data(chart)]
    lost = {(m["arm"], m["reason"]) for m in marks if m.get("counts") is False}
    assert lost == {(arm, "the hypervisor took 3% of cpu1") for arm in ("base", "linears-unpacked")}


@pytest.fixture
def folder(tmp_path):
    shutil.copy(FOLDER / "cpu-short" / "experiment.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["cpu-default", "cpu-default-decode"])
def test_the_command_that_makes_it_again_is_one(cli, name):
    *start, plan = shlex.split(dict(committed(name).notes)["again"])
    assert start == ["python", "-m", "harness", "serving", "experiment"]
    asked = Experiment.model_validate_json((FOLDER / name / "experiment.json").read_bytes())
    assert read_experiment(plan) == asked
    assert cli(*start[3:], plan, "--dry-run").returncode == 0


def journal(folder, *lines):
    live = folder / "live" / "linears-bf16"
    live.mkdir(parents=True)
    (live / "live.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


PLAN = {"kind": "plan", "arms": [{"name": "base"}, {"name": "<b>'\"alert(1)"}]}


def test_an_experiment_just_begun(folder):
    section = experiment_section(folder)
    assert section.headline == "Nothing was predicted or observed."
    assert section.sections[1].headline == "No live runs yet."
    journal(folder)
    assert experiment_section(folder).sections[1].headline == "No live runs yet."


def test_hostile_names_and_runs_without_numbers(folder):
    arm = PLAN["arms"][1]["name"]
    run = {"kind": "run", "pair": 0, "attempt": 0, "status": "failed", "reasons": [arm]}
    timed = run | {"steady_itl_ms": 5.0, "mean_ttft_ms": float("nan")}
    journal(folder, PLAN, timed | {"arm": "base"}, run | {"arm": arm})
    section = experiment_section(folder)
    require_valid(section)
    (chart,) = charts(section)
    assert chart.marks == 1 and len(chart.table.rows) == 1
    assert not [text for text in expressions(compiled(chart)) if "alert" in text]


def test_broken_files_are_refused(folder, tmp_path_factory):
    journal(folder, {"kind": "plan"})
    with pytest.raises(UsageError, match="no journal of live runs"):
        experiment_section(folder)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UsageError, match="cannot read"):
        experiment_section(empty)
    (empty / "experiment.json").write_text("")
    with pytest.raises(UsageError, match="cannot read"):
        experiment_section(empty)


def test_a_replays_times_and_differences():
    (replay,) = replays(json.loads(archive.read_bytes(REPLAY)), "")
    section = replay_section([replay, replay], "replay")
    require_valid(section)
    classes, places, changes = (data(chart) for chart in charts(section)[:3])
    for name, arm in replay.arms.items():
        shown = {m["class"]: m["ms"] for m in classes if m["arm"] == name and "class" in m}
        assert shown == arm.classes
        assert {m["place"]: m["ms"] for m in places if m["arm"] == name} == arm.places
    change = replay.arms["experts-grouped"].change
    (whole,) = [m for m in changes if m.get("method") == "the whole step" and m["arm"] == "experts-grouped"]
    assert (whole["ms"], whole["low"], whole["high"]) == (change.ms, change.low, change.high)


def test_replays_that_failed_or_are_broken(tmp_path):
    document = json.loads(archive.read_bytes(REPLAY))["replays"][0]
    arms = {"base": {"chosen": {}, "failed": "<script>"}}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(document | {"arms": arms, "twin": None, "step": {}}))
    section = written_section(file)
    assert not charts(section) and "base failed: <script>" in section.sections[0].headline
    assert replay_section([], "none").headline == "Nothing was replayed."
    for content in ("", "3", "{}"):
        file.write_text(content)
        with pytest.raises(UsageError, match=r"a\.json"):
            written_section(file)


def test_a_packed_replay_is_found_by_the_path_it_was_written_at():
    (section,) = assemble(inputs([str(REPLAY)])).sections
    assert section.title == REPLAY.name and len(section.sections) == 1
