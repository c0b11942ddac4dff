"""The command of a wrong row: what a check needs to make the same call, and nothing that it does anyway."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli import cli
from harness.report.reproduce import reproductions
from harness.results.schema import Cell


def cell(**facts: Any) -> Cell:
    told = {
        "op": "fused_moe", "case": "fused_moe tokens=64 routing=zipf:0.8 core", "boundary": "core",
        "impl": "aiter.moe", "platform": "rocm", "arch": "gfx942", "arm": "plain", "launch": "graph",
        "cache": "serving", "status": "wrong", "reason": "3 of 64 rows are off",
    } | facts  # fmt: skip
    return Cell(**told)


def run(**facts: Any) -> Any:
    told = {"arms": {"plain": {}}, "trees": {}, "seed": 0, "threads": 8, "command": []} | facts
    return SimpleNamespace(**told)


def commands(*cells: Cell, **of_run: Any) -> list[str]:
    return [text for _, text in reproductions(cells, run(**of_run))]


def test_a_row_by_default():
    case = '--case "tokens=64 routing=zipf:0.8"'
    (text,) = commands(cell())
    assert text == f"python -m harness check --op fused_moe --impl aiter.moe {case} --save wrong"


@pytest.mark.parametrize(
    ("facts", "of_run", "words"),
    [
        ({"boundary": "with_quant", "case": "fused_moe tokens=64 routing=zipf:0.8 with_quant"}, {},
         ["--boundary", "with_quant"]),
        ({"cache": "cold"}, {}, ["--cache", "cold"]),
        ({"platform": "cpu", "launch": "eager"}, {}, ["--device", "cpu"]),
        ({"launch": "eager"}, {}, ["--launch", "eager"]),
        ({"config": {"block_m": 16, "stages": 2}}, {}, ["--config", "block_m=16 stages=2"]),
        ({}, {"seed": 7}, ["--seed", "7"]),
        ({}, {"command": ["run", "--threads", "8"]}, ["--threads", "8"]),
        ({"arm": "A=b c"}, {"arms": {"A=b c": {"A": "b c"}}}, ["--set", "A=b c"]),
    ],
)  # fmt: skip
def test_what_is_not_the_rule_is_said(facts, of_run, words):
    (text,) = commands(cell(**facts), **of_run)
    said = shlex.split(text)
    assert said[3:9] == ["check", "--op", "fused_moe", "--impl", "aiter.moe", "--case"]
    assert said[9] == "tokens=64 routing=zipf:0.8"
    assert said[10:-2] == words
    context = cli.get_command(None, "check").make_context("check", said[4:])
    assert context.params["impl"] == "aiter.moe"


def test_a_variable_that_the_arm_takes_away():
    (text,) = commands(cell(arm="A unset"), arms={"A unset": {"A": None}})
    assert text.startswith("env -u A python -m harness check ")


def test_the_case_that_showed_it_is_named_where_it_was_another():
    reason = "at tokens=37 experts=16 routing=zipf:0.8: 3 of 37 rows are off, in token 3: all zero"
    (text,) = commands(cell(reason=reason))
    assert '--case "tokens=37 experts=16 routing=zipf:0.8" ' in text


def test_other_rows_and_other_trees_have_none():
    assert commands(cell(status="crashed"), cell(status="ok"), cell(status="unsupported")) == []
    assert commands(cell(arm="HEAD"), trees={"HEAD": "/somewhere"}) == []
