"""Kernels that give right answers in the first check only, in real runs beside honest ones."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.support.command_line import undisturbed
from tests.support.paths import SUPPORT
from tests.support.workers_here import run_here

# In a turn drawn at random, or then.
KEPT = "after timing: its timed calls gave an old answer", "with other live operands: "
CHEATS = {
    "cached_answer": KEPT,
    "answer_by_pointer": KEPT,
    "keeps_its_answer": "after timing: ",
    "stops_computing": "after timing: ",
    "stale_copy": "with other live operands: ",
    "converts_when_loaded": ("its output did not change with kv, written in place: its calls do not read ",),
    "wrong_when_timed": "after timing: 32 of 32 rows are off",
    "stale_page_table": "with other stationary operands: ",
    "writes_operands": "it changed its operands",
    "first_set_only": "after timing: ",
    "writes_operands_when_timed": "after timing: it changed its operands",
}


@pytest.fixture(scope="module")
def cheated(tmp_path_factory) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and cells of one run of all that cheat, beside two that do not. Ragged cases are left out,
    which some would be caught at before."""
    where = tmp_path_factory.mktemp("cheated") / "run"
    command = "--op mla_decode --case 'batch=2 ctx=40..150 page=16' --impl cheating.*,torch.sdpa --budget 2s"
    options = "--device cpu --threads 1 --json - --quiet --out"
    plugin = SUPPORT / "cheating_kernels.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.run.measurer.ragged_cases", lambda *_: [])
        done = run_here(*shlex.split(command), *shlex.split(options), where, plugin=plugin)
    assert done.stdout, done.stderr
    cells = json.loads(done.stdout)["cells"]
    return done.returncode, {cell["impl"].removeprefix("cheating."): cell for cell in cells}


def test_who_cheats_is_listed_here(cheated):
    assert set(cheated[1]) == {*CHEATS, "honest", "shares_with_the_writer", "torch.sdpa"}
    assert cheated[0] == 1


@pytest.mark.parametrize(("name", "reason"), CHEATS.items())
def test_who_cheats_is_wrong_and_gets_no_time(name, reason, cheated):
    cell = cheated[1][name]
    assert cell["status"] == "wrong"
    assert cell["reason"].startswith(reason)
    assert cell["time_us"] is None


@pytest.mark.parametrize(("name", "picked"), [("honest", "plain torch"), ("torch.sdpa", "")])
def test_who_does_not_cheat_is_right_beside_them(name, picked, cheated):
    cell = cheated[1][name]
    assert (cell["status"], undisturbed(cell["reason"]), cell["picked"]) == ("ok", picked, picked)
    assert cell["time_us"] > 0


def test_whose_operands_were_changed_by_another_is_told_by_whom(cheated):
    cell = cheated[1]["shares_with_the_writer"]
    assert (cell["status"], cell["time_us"]) == ("error", None)
    assert cell["reason"].startswith("cheating.writes_operands_when_timed changed the operands")
