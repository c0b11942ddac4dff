"""`tune` where the implementation can be timed: races of a plugin's configurations on the CPU, from the
command line; how a stopped one goes on; what is stored of a case, and who enters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import kernels
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, Verdict
from harness.tune.race import RacedConfigs, choice
from kernels import tuning
from kernels.triton_runtime import CPU
from kernels.tuning import Choice, Target
from tests.harness.run.test_faults import within, workers
from tests.support.command_line import error_line
from tests.support.paths import SUPPORT
from tests.support.recorded_verdicts import redo

CHUNKED = SUPPORT / "chunked_kernels.py"
HERE = ("tune", "--op", "block_scale_gemm", "--impl", "plugin.chunked", "--device", "cpu")
SHORT = ("--budget", "6s", "--per-case", "2s", "--call-timeout", "20s", "--prepare-timeout", "60s")
SMALL = "m=4 n=512 k=256"

pytestmark = pytest.mark.alone


def stored(folder: Path) -> dict[str, dict]:
    """Choices by case."""
    file = folder / "cpu" / "plugin.chunked.json"
    return {one["case"]: one for one in json.loads(file.read_text())["choices"]} if file.exists() else {}


def cells(run: Path) -> list[dict[str, Cell]]:
    """Of each finished case, by configuration."""
    return [
        {tuning._words(r.config): r for r in records if isinstance(r, Cell)}
        for records in Journal(run).finished().values()
    ]


def told_apart(run: Path) -> set[str]:
    """Cases in which the machine was quiet enough for a verdict."""
    return {
        records[0].case.removeprefix("block_scale_gemm ").removesuffix(" core")
        for records in Journal(run).finished().values()
        if any(isinstance(r, Verdict) and r.about == "baseline" and r.floor is not None for r in records)
    }


# A race from the command line


@pytest.fixture(scope="module")
def raced(cli, tmp_path_factory):
    """One case, with a configuration that is wrong and one that raises after two calls."""
    place = tmp_path_factory.mktemp("race")
    done = cli(
        *(
            *HERE,
            *SHORT,
            *("--budget", "12s", "--per-case", "12s"),  # so that the winner is prepared six times
            "--case",
            SMALL,
            "--out",
            place / "tuned",
            "--journal",
            place / "run",
            "--json",
            "-",
        ),
        KERNEL_BENCH_PLUGINS=CHUNKED,
        KERNEL_BENCH_TUNED=place,
        FAULTS="wrong raise",
    )
    return done, place


def won(found: dict) -> None:
    """Few columns at a time take several times as long; where a busy machine hid that, the rule's stay."""
    if found["verdict"] == "unclear":
        assert found["config"] == {"columns": 16, "fault": ""}
    else:
        assert found["config"]["columns"] in (128, 512)
        assert found["against"] == {"columns": 16, "fault": ""}
        assert (found["verdict"], found["before"][:7]) == ("faster", "by rule")
        assert found["low"] > 1


@pytest.fixture
def judged(raced):
    if not told_apart(raced[1] / "run"):
        pytest.skip("this machine is too disturbed for any verdict")
    return raced


def test_the_winner_is_stored_with_what_it_was_held_against(judged):
    done, place = judged
    (found,) = stored(place / "tuned").values()
    won(found)
    assert found["low"] < found["ratio"] < found["high"]
    assert (found["considered"], found["raced"], found["pruned"]) == (7, 7, {})
    assert found["failed"] == {"wrong": 1, "error": 1}
    assert (found["run"], found["launch"], found["cache"]) == ("run", "eager", "serving")
    assert found["torch"]
    assert found["commit"]
    file = json.loads((place / "tuned" / "cpu" / "plugin.chunked.json").read_text())
    assert (file["kind"], file["measured"]) == ("cpu", True)
    (row,) = json.loads(done.stdout[done.stdout.index('{\n "tuned"') :])["tuned"]
    assert row["config"] == found["config"]


def test_what_is_wrong_is_reported_and_fails_the_command(raced):
    done, place = raced
    assert done.returncode == 1
    assert "wrong: m=4 n=512 k=256" in done.stderr
    assert "error: m=4 n=512 k=256" in done.stderr
    (of,) = cells(place / "run")
    assert (of["columns=128 fault=wrong"].status, of["columns=128 fault=raise"].status) == ("wrong", "error")
    assert of["columns=128 fault=raise"].reason == "RuntimeError: out of luck"
    assert not of["columns=128 fault=wrong"].heats.seconds, "a wrong one gets no time"


def test_rounds_that_chose_and_rounds_that_judge_are_recorded_apart(raced):
    _, place = raced
    (records,) = Journal(place / "run").finished().values()
    (of,) = cells(place / "run")
    (winner,) = (cell for name, cell in of.items() if cell.samples.seconds and "=16 " not in name)
    assert winner.heats.seconds
    assert winner.samples.seconds
    assert set(winner.heats.block).isdisjoint(winner.samples.block)
    beaten = of["columns=8 fault="]
    assert (beaten.status, beaten.samples.seconds) == ("ok", [])
    assert beaten.reason.startswith("beaten in the heats: ")
    assert beaten.time_us
    for verdict, again in redo(records):
        assert (verdict.ratio, verdict.verdict) == (pytest.approx(again.ratio), again.verdict)
    (done,) = (r for r in records if isinstance(r, CaseDone))
    assert done.entries.anchor == {"columns": 16, "fault": ""}
    assert done.heats


def test_what_was_stored_is_used(judged, monkeypatch):
    _, place = judged
    monkeypatch.setenv("KERNEL_BENCH_PLUGINS", str(CHUNKED))
    monkeypatch.setattr(kernels, "_importing", True)
    monkeypatch.setenv("KERNEL_BENCH_TUNED", str(place / "tuned"))
    kernels.implementations.cache_clear()
    tuning.stored.cache_clear()
    try:
        (chunked,) = (i for i in kernels.implementations("block_scale_gemm") if i.name == "plugin.chunked")
        chosen = chunked.choose(CPU, kernels.OPS["block_scale_gemm"].sizes({"m": 4, "n": 512, "k": 256}))
    finally:
        monkeypatch.undo()
        kernels.implementations.cache_clear()
        tuning.stored.cache_clear()
    (found,) = stored(place / "tuned").values()
    assert chosen == Choice(chunked.Config(**found["config"]), "measured on cpu, for this case")


def test_a_race_is_not_resumed_as_a_run(raced, cli):
    _, place = raced
    line = error_line(cli("run", "--resume", place / "run", KERNEL_BENCH_PLUGINS=CHUNKED))
    assert line == f"{place / 'run'} is a race: python -m harness tune --resume goes on with it"


@pytest.mark.slow
def test_who_hangs_or_dies_costs_only_itself(cli, tmp_path):
    done = cli(
        *(*HERE, *SHORT, "--case", SMALL, "--out", tmp_path / "tuned", "--journal", tmp_path / "run"),
        KERNEL_BENCH_PLUGINS=CHUNKED,
        FAULTS="die hang",
    )
    assert done.returncode == 1
    (of,) = cells(tmp_path / "run")
    assert {name: cell.status for name, cell in of.items() if cell.status != "ok"} == {
        "columns=128 fault=die": "crashed",
        "columns=128 fault=hang": "timeout",
    }
    assert set(stored(tmp_path / "tuned")) == told_apart(tmp_path / "run")
    for found in stored(tmp_path / "tuned").values():
        won(found)
        assert found["failed"] == {"crashed": 1, "timeout": 1}


# Stopped and going on


@pytest.fixture
def start(cli):
    """Starts a race of two cases; none outlives its test."""
    races: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        races.append(
            subprocess.Popen(
                cli.command(*arguments),
                cwd=cli.folder,
                env=cli.environment(KERNEL_BENCH_PLUGINS=CHUNKED),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return races[-1]

    yield start
    for race in races:
        if race.poll() is None:
            race.kill()
            race.communicate()


@pytest.mark.slow
def test_a_race_that_is_killed_loses_no_finished_case_and_goes_on(cli, start, tmp_path):
    out, run = tmp_path / "tuned", tmp_path / "run"
    two = ("--case", "m=1,4 n=512 k=256", "--out", out, "--journal", run)
    race = start(*HERE, *SHORT, *two)
    assert within(120, lambda: (run / "run.json").exists() and Journal(run).finished())
    race.kill()
    race.communicate()
    assert within(120, lambda: not workers())
    before = Journal(run).finished()
    (key,) = before

    # Between recording and storing: what is recorded is stored by whoever goes on.
    (out / "cpu" / "plugin.chunked.json").unlink(missing_ok=True)
    again = cli("tune", "--resume", run, KERNEL_BENCH_PLUGINS=CHUNKED)
    assert again.returncode == 0, again.stderr
    assert key not in again.stderr, "it is not raced again"
    assert Journal(run).finished()[key] == before[key]
    assert len(Journal(run).finished()) == 2
    assert set(stored(out)) == told_apart(run)

    # All is there: nothing is measured, and a newer choice for a case stays.
    file, written = out / "cpu" / "plugin.chunked.json", (run / "cells.jsonl").read_bytes()
    for one in stored(out).values():
        file.write_text(file.read_text().replace(one["created"], "2999-01-01T00:00:00Z"))
    newer = stored(out)
    assert cli("tune", "--resume", run, KERNEL_BENCH_PLUGINS=CHUNKED).returncode == 0
    assert ((run / "cells.jsonl").read_bytes(), stored(out)) == (written, newer)


def test_control_c(start, tmp_path):
    race = start(*HERE, *SHORT, "--case", SMALL, "--out", tmp_path / "tuned", "--journal", tmp_path / "run")
    assert any(line.endswith("  measuring\n") for line in race.stderr)
    race.send_signal(signal.SIGINT)
    stderr = race.communicate(timeout=120)[1]
    assert race.returncode == 130
    assert stderr.strip() == "stopped; finished cases are stored, tune --resume RUN races the rest"
    assert not workers()
    assert Journal(tmp_path / "run").finished() == {}
    assert not stored(tmp_path / "tuned")


# The command line


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("--target", "sm_90", "--budget", "3s"), "--budget is for races; --target compiles", 2),
        (("--check", "--resume", "x"), "--resume is for races; --check compiles", 2),
        (
            ("--impl", "triton.*", "--keep", "3"),
            "--keep is for races, and nothing of these can be timed on",
            3,
        ),
        (("--shard", "3/2"), "--shard 3/2: write 1/4 for the first of four parts", 2),
        (("--device", "gpu"), "no device 'gpu'; devices here: ", 2),
    ],
)
def test_mistakes(cli, tmp_path, arguments, said, code):
    done = cli("tune", "--op", "block_scale_gemm", *arguments, "--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert error_line(done, code).startswith(said)


# Who enters


@pytest.fixture
def chunked(monkeypatch):
    monkeypatch.setenv("KERNEL_BENCH_PLUGINS", str(CHUNKED))
    monkeypatch.setattr(kernels, "_importing", True)
    kernels.implementations.cache_clear()
    yield next(i for i in kernels.implementations("block_scale_gemm") if i.name == "plugin.chunked")
    monkeypatch.undo()
    kernels.implementations.cache_clear()


CASE = kernels.OPS["block_scale_gemm"].case({"m": 4, "n": 512, "k": 256})


def test_what_would_be_used_is_the_anchor_and_enters_once(chunked):
    field = RacedConfigs(chunked, CPU, keep=2, log=print)
    entries = field.entries(chunked, CASE)
    assert [config["columns"] for config in entries.configs] == [16, 8, 32, 128, 512]
    assert "all configurations are raced" in field.unpruned


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")
def test_the_best_by_the_estimate_enter_where_it_knows_the_device():
    triton = pytest.importorskip("triton")
    assert triton
    (impl,) = (i for i in kernels.implementations("block_scale_gemm") if i.name == "triton.split_k")
    field = RacedConfigs(impl, Target("cuda", "sm_90", 78, "a smaller H100"), keep=3, log=lambda _: None)
    entries = field.entries(impl, CASE)
    assert field.unpruned == ""
    assert field.compiling.architecture.units == 78
    assert len(entries.configs) in (3, 4), "the anchor is among the best, or comes on top"
    assert entries.search.raced == len(entries.configs)
    assert entries.search.considered == 3 + sum(entries.search.pruned.values())


# What is stored


def records(*verdicts: tuple[str, str, float | None]) -> list:
    """Of contenders of which each was held against the anchor: (columns, verdict, floor)."""
    facts = {
        "op": CASE.op,
        "case": CASE.key,
        "boundary": "core",
        "impl": "plugin.chunked",
        "platform": "cpu",
        "arch": "x",
        "arm": "plain",
        "launch": "eager",
        "cache": "warm",
        "status": "ok",
    }
    names = ["16", *(columns for columns, _, _ in verdicts)]
    found: list = [Cell(**facts, time_us=10.0, config={"columns": int(n), "fault": ""}) for n in names]
    ratios = {"faster": (1.25, 1.2, 1.3), "slower": (0.8, 0.75, 0.85), "unclear": (1.0, 0.5, 2.0)}
    for cell, (_, word, floor) in zip(found[1:], verdicts, strict=True):
        ratio, low, high = ratios[word]
        found.append(
            Verdict(
                case=CASE.key,
                a=cell.name,
                b=found[0].name,
                ratio=ratio,
                low=low,
                high=high,
                floor=floor,
                verdict=word,
                confidence=0.95,
                about="baseline",
            )
        )
    entries = {"anchor": {}, "origin": "by rule", "considered": 9, "pruned": {}, "raced": len(names)}
    conditions = [{"sm_clock_mhz": {"min": 1, "median": 1500, "max": 2}, "samples": 3}]
    done = CaseDone(
        case=CASE.key, measured_s=1, setup_s=1, rounds=1, blocks=1, stopped="clear", entries=entries,
        conditions=conditions,
    )  # fmt: skip
    return [*found, done]


@pytest.fixture
def chosen(chunked, raced):
    run = Journal(raced[1] / "run").run()
    return lambda *verdicts: choice(CASE, records(*verdicts), chunked, run)


def test_a_challenger_is_stored_only_if_it_is_faster(chosen):
    found = chosen(("128", "faster", 0.0))
    assert (found["config"]["columns"], found["against"]["columns"]) == (128, 16)
    assert (found["verdict"], found["ratio"], found["low"], found["high"]) == ("faster", 1.25, 1.2, 1.3)
    assert found["conditions"] == {"sm_clock_mhz": 1500}
    for word, turned in (("slower", "faster"), ("unclear", "unclear")):
        found = chosen(("128", word, 0.0))
        assert (found["config"]["columns"], found["against"]["columns"]) == (16, 128)
        assert found["verdict"] == turned
        assert found["low"] <= found["ratio"] <= found["high"]
    assert chosen(("128", "slower", 0.0))["ratio"] == 1.25


def test_of_several_groups_the_surest_is_stored(chosen):
    assert chosen(("8", "unclear", 0.0), ("128", "faster", 0.0))["config"]["columns"] == 128


def test_what_the_noise_swallowed_is_not_stored(chosen):
    assert chosen(("128", "unclear", None)) is None
    assert chosen() is None
