"""`tune`: a race of a plugin's configurations on the CPU, how a stopped race is resumed, what is stored for a
case, and which configurations are raced."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

import kernels
from harness.cluster.execute import race_on_cluster
from harness.compile.compiler import Resources
from harness.errors import FAILED, OK, HarnessError
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, RaceSettings, Verdict
from harness.tune import configs, store
from harness.tune.configs import NEIGHBOURS, NOT_KEPT, raced_configs
from harness.tune.race import Race, TuneRequest, race_result
from harness.tune.store import choice
from kernels import tuning
from kernels.platform import version
from kernels.triton_runtime import CPU
from kernels.tuning import Choice, Target
from shapes.case import text_of
from tests.support.paths import SUPPORT
from tests.support.recorded_verdicts import redo
from tests.support.simulated_pool import pool
from tests.support.workers_here import run_here
from tests.support.written_runs import a_cell, a_run

CHUNKED = SUPPORT / "chunked_kernels.py"
HERE = ("--op", "block_scale_gemm", "--impl", "plugin.chunked", "--device", "cpu")
SHORT = ("--budget", "5m", "--per-case", "1s", "--keep", "30")
BOTH = {"m=1 n=512 k=256", "m=4 n=512 k=256"}


def tune_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here(*arguments, plugin=CHUNKED, command="tune")


def stored(folder: Path) -> dict[str, dict]:
    """Choices by case."""
    file = folder / "cpu" / "plugin.chunked.json"
    choices = json.loads(file.read_text())["choices"] if file.exists() else []
    return {one["case"].partition(" fp8")[0]: one for one in choices}


def told_apart(run: Path) -> set[str]:
    """The cases in which the machine was quiet enough for a verdict; nothing is stored for the others."""
    return {
        records[0].case.removeprefix("block_scale_gemm ").partition(" fp8")[0]
        for records in Journal(run).finished().values()
        if any(isinstance(r, Verdict) and r.about == "baseline" and r.noise is not None for r in records)
    }


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """Two cases, with a configuration that is wrong and one that raises."""
    place = tmp_path_factory.mktemp("race")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_BENCH_TUNED", str(place))
        patch.setenv("FAULTS", "wrong raise")
        out = ("--out", place / "tuned", "--journal", place / "run", "--json", place / "rows.json")
        done = tune_here(*HERE, *SHORT, "--case", "m=1,4 n=512 k=256", *out)
    return done, place


def test_what_is_wrong_is_reported_and_fails_the_command(raced):
    done, place = raced
    assert done.returncode == 1, done.stderr
    assert "wrong: m=4 n=512 k=256" in done.stderr and "error: m=4 n=512 k=256" in done.stderr
    assert len(Journal(place / "run").finished()) == 2 and Journal(place / "run").run().race.keep == 30
    for records in Journal(place / "run").finished().values():
        of = {text_of(r.config): r for r in records if isinstance(r, Cell)}
        assert len(of) == 7
        wrong, raising = (of[f"columns=128 fault={fault}"] for fault in ("wrong", "raise"))
        assert (wrong.status, wrong.eliminations.seconds) == ("wrong", []), "a wrong one gets no time"
        assert (raising.status, raising.reason) == (
            "error",
            "chunked_kernels.py:53 in call: RuntimeError: out of luck",
        )
        assert {r.status for r in of.values() if r not in (wrong, raising)} == {"ok"}


def test_rounds_that_chose_and_rounds_that_judge_are_recorded_apart(raced):
    for records in Journal(raced[1] / "run").finished().values():
        timed = [r for r in records if isinstance(r, Cell) and r.status == "ok"]
        for cell in timed:
            assert cell.eliminations.seconds and cell.time_us
            assert set(cell.eliminations.block).isdisjoint(cell.samples.block)
            assert bool(cell.samples.seconds) != ("beaten in the eliminations: " in cell.reason)
        assert sum(bool(cell.samples.seconds) for cell in timed) == 2, "the winner and the baseline"
        for verdict, again in redo(records):
            assert (verdict.ratio, verdict.verdict) == (pytest.approx(again.ratio), again.verdict)
        (done,) = (r for r in records if isinstance(r, CaseDone))
        assert done.search.baseline == {"columns": 16, "fault": ""} and done.eliminations


def test_what_could_be_told_is_stored_and_printed(raced):
    _, place = raced
    choices = stored(place / "tuned")
    assert set(choices) == told_apart(place / "run")
    rows = json.loads((place / "rows.json").read_text())["tuned"]
    assert {row["case"].partition(" fp8")[0] for row in rows} == BOTH
    for row in rows:
        found = choices.get(row["case"].partition(" fp8")[0])
        assert row["config"] == (found["config"] if found else None)
        if found:
            assert (found["considered"], found["raced"], found["pruned"]) == (7, 7, {})
            assert found["failed"] == {"wrong": 1, "error": 1}
            assert (found["run"], found["launch"], found["cache"]) == ("run", "eager", "serving")


def test_a_race_that_is_stopped_loses_no_finished_case_and_goes_on(raced, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS", "wrong raise")
    shutil.copytree(raced[1] / "run", run := tmp_path / "run")
    before = Journal(run).finished()
    first, second = before
    lines = (run / "cells.jsonl").read_text().splitlines(keepends=True)
    (run / "cells.jsonl").write_text("".join(lines[: len(before[first]) + 3]))  # in the second case's records
    asked = json.loads((run / "run.json").read_text())
    asked["race"]["folder"] = str(tmp_path / "tuned")
    (run / "run.json").write_text(json.dumps(asked))
    again = tune_here("--resume", run)
    assert again.returncode == 1, again.stderr
    after = Journal(run).finished()
    assert (set(after), after[first]) == ({first, second}, before[first])
    assert after[second] != before[second]
    assert set(stored(tmp_path / "tuned")) == told_apart(run), "what was recorded before is stored, too"

    # All is there: nothing is measured, and a newer choice for a case stays.
    file, written = tmp_path / "tuned/cpu/plugin.chunked.json", (run / "cells.jsonl").read_bytes()
    for one in stored(tmp_path / "tuned").values():
        file.write_text(file.read_text().replace(one["created"], "2999-01-01T00:00:00Z"))
    newer = stored(tmp_path / "tuned")
    assert tune_here("--resume", run).returncode == 1
    assert ((run / "cells.jsonl").read_bytes(), stored(tmp_path / "tuned")) == (written, newer)


def test_a_race_is_not_resumed_as_a_run(raced):
    done = run_here("--resume", raced[1] / "run", plugin=CHUNKED)
    run = raced[1] / "run"
    said = f"error: {run} is a race; to go on with it: python -m harness tune --resume {run}\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_control_c(here, monkeypatch, tmp_path):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.tune.race.tune", interrupted)
    stopped = here("tune", *HERE, "--out", tmp_path)
    said = "stopped; finished cases are stored, tune --resume RUN races the rest\n"
    assert (stopped.returncode, stopped.stderr) == (130, said)


@pytest.fixture
def chunked(monkeypatch):
    monkeypatch.setenv("KERNEL_BENCH_PLUGINS", str(CHUNKED))
    monkeypatch.setattr(kernels, "_imports_plugins", True)
    kernels.implementations.cache_clear()
    yield next(i for i in kernels.implementations("block_scale_gemm") if i.name == "plugin.chunked")
    monkeypatch.undo()
    kernels.implementations.cache_clear()


CASE = kernels.OPS["block_scale_gemm"].case({"m": 4, "n": 512, "k": 256})


def test_what_would_be_used_is_the_baseline_and_enters_once(chunked):
    entries, search = raced_configs(chunked, CASE, CPU, 9, {})
    first, *others = [config["columns"] for config in entries]
    assert (first, sorted(others), search.pruned) == (16, [8, 32, 128, 512], {})
    few, search = raced_configs(chunked, CASE, CPU, 2, {})
    assert few == entries[:3], "the order is the same at each time"
    assert (search.considered, search.raced, search.pruned) == (5, 3, {NOT_KEPT: 2})


def test_configurations_that_neighbouring_sizes_use_come_first(chunked, monkeypatch, tmp_path):
    file = store.path(tmp_path, "plugin.chunked", CPU)
    for m, columns in ((8, 512), (4096, 8), (3, 999), (2, 128), (4, 16)):
        choice = {"case": f"m={m}", "features": {"m": m}, "config": {"columns": columns, "fault": ""}}
        store.store(file, CPU, choice, {"source": "s"})
    monkeypatch.setenv("KERNEL_BENCH_TUNED", str(tmp_path))
    tuning.stored_choices.cache_clear()
    monkeypatch.setattr(type(chunked), "features", lambda self, sizes: {"m": sizes.m})
    entries, search = raced_configs(chunked, CASE, CPU, 3, {})
    tuning.stored_choices.cache_clear()
    assert [config["columns"] for config in entries] == [16, 128, 512, 8], "999 is not offered here"
    assert search.origin == "measured on cpu, for this case" and NEIGHBOURS >= 3


SPLIT_K = next(i for i in kernels.implementations("block_scale_gemm") if i.name == "triton.split_k")
H100 = Target("cuda", "sm_90", 78, "a smaller H100")
LARGE = kernels.OPS["block_scale_gemm"].case({"m": 4096, "n": 2112, "k": 7168})


@pytest.mark.skipif(not version("triton") or os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")
def test_configurations_that_the_architecture_has_no_room_for_do_not_enter(monkeypatch):
    """Nothing is compiled: the resources are made up, and always the same for the same launch."""
    compiled: list[str] = []

    def compile_all(launches, where):
        compiled.extend(launch.data for launch in launches)
        draws = [random.Random(launch.data).random() for launch in launches]
        return [Resources(shared_bytes=300_000 if draw < 0.5 else 0, threads=128) for draw in draws]

    monkeypatch.setattr(configs, "compile_all", compile_all)
    entries, search = raced_configs(SPLIT_K, LARGE, H100, 6, {})
    assert len(entries) == search.raced == 7
    assert search.considered == 7 + sum(search.pruned.values())
    assert search.pruned["takes 300000 bytes of shared memory; sm_90 has 232448"] > 0
    assert 6 <= len(set(compiled)) < 60, "no more are compiled than it takes"

    def prepare_for(self, *given):
        raise StopIteration

    monkeypatch.setattr(type(SPLIT_K), "prepare_for", prepare_for)
    entries, search = raced_configs(SPLIT_K, LARGE, H100, 6, {})
    assert search.raced == 1
    assert search.pruned == {"StopIteration": search.considered - 1}


@pytest.mark.slow
@pytest.mark.skipif(not version("triton") or os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")
def test_configurations_are_compiled_before_they_enter():
    entries, search = raced_configs(SPLIT_K, LARGE, H100, 3, {})
    assert search.raced == len(entries) == 4
    assert search.considered == 4 + sum(search.pruned.values())


def records(*verdicts: tuple[str, str, float | None], anchor: int | None = None) -> list:
    """Records of a case whose entries were compared with the baseline, each as (columns, verdict, noise)."""
    facts = {"op": CASE.op, "case": CASE.key, "impl": "plugin.chunked", "time_us": 10.0}
    names = ["16", *(columns for columns, _, _ in verdicts)]
    found: list = [a_cell(**facts, config={"columns": int(n), "fault": ""}) for n in names]
    ratios = {"faster": (1.25, 1.2, 1.3), "slower": (0.8, 0.75, 0.85), "unclear": (1.0, 0.5, 2.0)}
    ratios["faster?"] = (1.4, 1.1, 1.8)  # less surely
    ratios["same?"] = (1.6, 1.3, 1.9)  # within its group's noise
    for cell, (_, word, noise) in zip(found[1:], verdicts, strict=True):
        ratio, low, high = ratios[word]
        facts = {"case": CASE.key, "a": cell.name, "b": found[0].name, "about": "baseline", "floor": noise}
        facts |= {"ratio": ratio, "low": low, "high": high, "verdict": word.rstrip("?"), "confidence": 0.95}
        found.append(Verdict(**facts))
    baseline = {"columns": anchor, "fault": ""} if anchor else {}
    entries = {"anchor": baseline, "origin": "by rule", "considered": 9, "pruned": {}, "raced": len(names)}
    conditions = [{"sm_clock_mhz": {"min": 1, "median": 1500, "max": 2}, "samples": 3}]
    done = {"measured_s": 1, "setup_s": 1, "rounds": 1, "blocks": 1, "stopped": "clear"}
    return [*found, CaseDone(case=CASE.key, entries=entries, conditions=conditions, **done)]


@pytest.fixture
def chosen(chunked):
    return lambda *verdicts: choice(CASE, records(*verdicts), chunked, a_run())


def test_a_challenger_is_stored_only_if_it_is_faster(chosen):
    found = chosen(("128", "faster", 0.0))
    assert (found["config"]["columns"], found["against"]["columns"]) == (128, 16)
    assert (found["verdict"], found["ratio"], found["low"], found["high"]) == ("faster", 1.25, 1.2, 1.3)
    assert (found["conditions"], found["before"]) == ({"sm_clock_mhz": 1500}, "by rule")
    for word, turned in (("slower", "faster"), ("unclear", "unclear")):
        found = chosen(("128", word, 0.0))
        assert (found["config"]["columns"], found["against"]["columns"]) == (16, 128)
        assert found["verdict"] == turned
        assert found["low"] <= found["ratio"] <= found["high"]
    assert chosen(("128", "slower", 0.0))["ratio"] == 1.25


@pytest.mark.parametrize(("verdicts", "columns"), [
    ([("8", "unclear", 0.0), ("128", "faster", 0.0)], (128, 16)),
    ([("8", "faster?", 0.0), ("128", "faster", 0.0)], (128, 16)),
    ([("128", "faster", 0.0), ("8", "faster?", 0.0)], (128, 16)),
    ([("8", "same?", 1.0), ("128", "faster", 0.0)], (128, 16)),
    ([("8", "unclear", 0.0), ("128", "slower", 0.0)], (16, 128)),  # what it was held against most surely
    ([("8", "faster", None), ("128", "slower", 0.0)], (16, 128)),  # the noise swallowed that one
    ([("128", "unclear", None)], None),
    ([], None),
])  # fmt: skip
def test_of_several_groups_the_surest_is_stored(chosen, verdicts, columns):
    found = chosen(*verdicts)
    assert columns == (found and (found["config"]["columns"], found["against"]["columns"]))


def test_what_was_stored_is_used(chunked, chosen, monkeypatch, tmp_path):
    file = store.path(tmp_path, "plugin.chunked", CPU)
    for columns in ("8", "128"):  # a later one takes the place of the first
        store.store(file, CPU, chosen((columns, "faster", 0.0)), {"source": "s"})
    monkeypatch.setenv("KERNEL_BENCH_TUNED", str(tmp_path))
    tuning.stored_choices.cache_clear()
    used = chunked.choose(CPU, kernels.OPS["block_scale_gemm"].sizes({"m": 4, "n": 512, "k": 256}))
    tuning.stored_choices.cache_clear()
    assert used == Choice(chunked.Config(128), "measured on cpu, for this case")


def test_devices_of_a_pool_share_the_cases_of_a_race(chunked, monkeypatch, tmp_path):
    """The times are made up and have no verdicts, so nothing is stored."""
    run = str(tmp_path / "run")
    begun = TuneRequest(op="block_scale_gemm", impl="plugin.chunked", case=["m=1,4 n=512 k=256"],
                        tuned=str(tmp_path), out=run, keep=2)  # fmt: skip
    goes_on = TuneRequest(tuned=str(tmp_path), resume=run)
    devices, failing = pool("ab"), pool("a", lambda device, case: "dies", grows=False)
    assert race_on_cluster(begun, Mock(), failing) == (FAILED, [])
    assert Journal(Path(run)).run().race == RaceSettings(keep=2, folder=str(tmp_path))
    for again in (devices, pool("a")):
        code, rows = race_on_cluster(goes_on, display := Mock(), again)
        assert (code, [row["config"] for row in rows]) == (OK, [None, None])
        assert display.end.call_args.args[1].cases == 2
    assert {device for device, _ in devices.measured} == {"a", "b"}
    told = {"choose one by --impl: plugin.chunked, p": [chunked] * 2, "can be timed on cpu": []}
    for said, several in told.items():
        monkeypatch.setattr("harness.plan.select.choose_implementations", Mock(return_value=several))
        with pytest.raises(HarnessError, match=said):
            race_on_cluster(begun, Mock(), pool("a"))


@pytest.mark.parametrize(("word", "code"), [("faster", FAILED), ("slower", OK), ("unclear", OK)])
def test_a_check_stores_nothing_and_fails_where_what_is_used_was_beaten(chunked, tmp_path, word, code):
    """The same records are taken with --check and without."""
    run = a_run().model_copy(update={"race": RaceSettings(keep=8, folder=str(tmp_path))})
    for stores in (False, True):
        race = Race(chunked, CPU, run, Mock(), stores=stores)
        race.on_case(CASE, records(("128", word, 0.0), anchor=16))
        said: list[str] = []
        found, (row,) = race_result([OK], [race], said.append)
        assert found == (OK if stores else code)
        beaten = [f"cpu plugin.chunked {CASE.text}: columns=128 fault= is faster than what is used now"]
        assert said == (beaten if found == FAILED else [])
        assert any(tmp_path.iterdir()) == stores and row["verdict"] in ("faster", "unclear")
