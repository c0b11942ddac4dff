"""pytest-benchmark: a session with its defaults, then the rule of its `--benchmark-compare-fail`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.engines.callables import VARIABLE
from tools.engines.verdicts import Ranking

RULE = "median:1%"
"""Whole percents are all that it takes: 1 % finds more than 2 %, and the median is least disturbed."""

Statistics = Mapping[str, float]


def rank(names: Sequence[str]) -> Ranking:
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "saved.json")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *("-p", "no:cacheprovider", "-p", "no:xdist"),
            f"--benchmark-json={saved}",
            str(Path(__file__).with_name("pytest_cases.py")),
        ]
        # Of a session around this one nothing is passed on.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        subprocess.run(
            command,
            env=ours | {VARIABLE: json.dumps(list(names))},
            stdout=sys.stderr,
            check=True,
        )
        benchmarks = json.loads(saved.read_text())["benchmarks"]
    found: dict[str, Statistics] = {b["extra_info"]["name"]: b["stats"] for b in benchmarks}
    return Ranking(
        {name: found[name]["median"] for name in names},
        {name: verdict(found[name], found[names[0]]) for name in names[1:]},
    )


def verdict(measured: Statistics, baseline: Statistics) -> str:
    """It tells regressions only: each of the two as the one that was saved before."""
    from pytest_benchmark.utils import parse_compare_fail

    rule = parse_compare_fail(RULE)
    if rule.fails(measured, baseline):
        return "slower"
    return "faster" if rule.fails(baseline, measured) else "same"
