"""Rows that fail in a run get no time and a reason, and the right rows beside them are timed."""

import json
import shlex
from typing import Any

import pytest

from tests.support.command_line import undisturbed
from tests.support.paths import SUPPORT
from tests.support.workers_here import run_here

RAGGED = "at batch=11 ctx=1..190 heads=16 page=16 kv=bf16: "
FAILS = {
    "answer_by_address": ("wrong", "after timing: its calls gave an old answer to new activations"),
    "stops_computing": ("wrong", "after timing: "),
    "wrong_when_timed": ("wrong", "after timing: 32 of 32 rows are off"),
    "first_set_only": ("wrong", "after timing: "),
    "stale_copy": ("wrong", "with other live operands: "),
    "stale_page_table": ("wrong", "with other operands: "),
    "writes_operands": ("wrong", "it changed its operands"),
    "writes_operands_when_timed": ("wrong", "after timing: it changed its operands"),
    "shares_with_the_writer": ("error", "failing.writes_operands_when_timed changed the operands that it "),
    "ninth_sequence": ("wrong", RAGGED),
    "raises_in_prepare": ("error", "RuntimeError: no such luck"),
    "unsupported": ("unsupported", "this build has no such kernel"),
    "raises_in_a_call": ("error", "RuntimeError: out of luck"),
    "crashes": ("crashed", "the worker died of SIGSEGV while in sample"),
    "hangs": ("timeout", "no answer within 20 s while in sample"),
}
RIGHT = {"failing.beside": "plain torch", "torch.sdpa": ""}


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The cells of a run of rows that fail and rows that are right, by implementation."""
    out = tmp_path_factory.mktemp("failing") / "run"
    command = "--op mla_decode --case 'batch=2 ctx=40..150 page=16' --impl failing.*,torch.sdpa --budget 1s"
    options = "--device cpu --threads 1 --json - --quiet --out"
    plugin = SUPPORT / "failing_kernels.py"
    done = run_here(*shlex.split(command), *shlex.split(options), out, plugin=plugin)
    assert done.returncode == 1, done.stderr
    by_impl = {cell["impl"]: cell for cell in json.loads(done.stdout)["cells"]}
    assert set(by_impl) == {*(f"failing.{name}" for name in FAILS), *RIGHT}
    return by_impl


@pytest.mark.parametrize(("name", "status", "reason"), [(name, *fails) for name, fails in FAILS.items()])
def test_a_row_that_fails_says_how_and_has_no_time(name, status, reason, cells):
    cell = cells[f"failing.{name}"]
    assert (cell["status"], cell["time_us"]) == (status, None)
    assert reason in cell["reason"]


@pytest.mark.parametrize(("name", "picked"), RIGHT.items())
def test_a_right_row_is_timed_beside_them(name, picked, cells):
    cell = cells[name]
    assert (cell["status"], undisturbed(cell["reason"]), cell["picked"]) == ("ok", picked, picked)
    assert cell["time_us"] > 0
    assert cell["check"]["calls"] >= 20
    blocks = set(cell["samples"]["block"])  # how many fit into the budget depends on the machine
    assert blocks == set(range(len(blocks)))
