"""The command of a wrong row: what a check needs to make the same call, and nothing that it does anyway."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.cli import cli
from harness.report.notes import FAR, reproductions
from harness.results.schema import Cell
from tests.support.written_runs import a_cell


def cell(**facts: Any) -> Cell:
    defaults = {
        "op": "fused_moe", "case": "fused_moe tokens=64 routing=zipf:0.8 core", "impl": "aiter.moe",
        "platform": "rocm", "arch": "gfx942", "launch": "graph", "cache": "serving", "status": "wrong",
        "reason": "3 of 64 rows are off",
    }  # fmt: skip
    return a_cell(**defaults | facts)


def run(**facts: Any) -> Any:
    attributes = {"settings": {"plain": {}}, "trees": {}, "seed": 0, "threads": 8, "command": []} | facts
    return SimpleNamespace(**attributes)


def commands(*cells: Cell, **run_facts: Any) -> list[str]:
    return [text for _, text in reproductions(cells, run(**run_facts))]


REASON = "at tokens=37 experts=16 routing=zipf:0.8: 3 of 37 rows are off, in token 3: all zero"
QUANT = {"boundary": "with_quant", "case": "fused_moe tokens=64 routing=zipf:0.8 with_quant"}
ROWS: dict[str, tuple[dict, dict]] = {
    "by default": ({}, {}),
    "another boundary": (QUANT, {}),
    "another cache": ({"cache": "cold"}, {}),
    "on a CPU": ({"platform": "cpu", "launch": "eager"}, {}),
    "eager on a GPU": ({"launch": "eager"}, {}),
    "a configuration": ({"config": {"block_m": 16, "stages": 2}}, {}),
    "another seed": ({}, {"seed": 7}),
    "threads that were asked for": ({}, {"command": ["run", "--threads", "8"]}),
    "a setting": ({"setting": "A=b c"}, {"settings": {"A=b c": {"A": "b c"}}}),
    "a setting that takes a variable away": ({"setting": "A unset"}, {"settings": {"A unset": {"A": None}}}),
    "the case that showed it was another": ({"reason": REASON}, {}),
    "with far addresses alone: none": ({"reason": f"{FAR}3 of 64 rows are off"}, {}),
    "crashed: none": ({"status": "crashed"}, {}),
    "right: none": ({"status": "ok"}, {}),
    "unsupported: none": ({"status": "unsupported"}, {}),
    "of another tree: none": ({"setting": "HEAD"}, {"trees": {"HEAD": "/somewhere"}}),
}


def test_what_is_not_the_rule_is_said(snapshot):
    lines = []
    for name, (facts, run_facts) in ROWS.items():
        found = commands(cell(**facts), **run_facts)
        for text in found:
            words = shlex.split(text)
            context = cli.get_command(None, "check").make_context("check", words[words.index("check") + 1 :])
            assert context.params["impl"] == "aiter.moe"
        lines += [f"=== {name}", *found]
    snapshot(Path(__file__).parent / "snapshots" / "reproduce.txt", "\n".join(lines) + "\n")
