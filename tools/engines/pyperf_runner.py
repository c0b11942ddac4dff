"""pyperf: its `Runner` with `--fast`, then what its `compare_to` says of two benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.engines.callables import VARIABLE
from tools.engines.verdicts import Ranking

if TYPE_CHECKING:
    from pyperf import Benchmark

PRESET = ("--fast",)
"""10 processes of 2 values for each callable. By default it takes 20 of 3, three times as long."""
QUICK = ("--processes=2", "--values=2")


def rank(names: Sequence[str], *, quick: bool) -> Ranking:
    import pyperf

    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "saved.json")
        command = [sys.executable, str(Path(__file__).with_name("pyperf_script.py")), "--copy-env", "--quiet"]
        subprocess.run(
            [*command, *(QUICK if quick else PRESET), f"--output={saved}"],
            env=os.environ | {VARIABLE: json.dumps(list(names))},
            stdout=sys.stderr,
            check=True,
        )
        found = {b.get_name(): b for b in pyperf.BenchmarkSuite.load(str(saved)).get_benchmarks()}
    return Ranking(
        {name: found[name].mean() for name in names},
        {name: verdict(found[name], found[names[0]]) for name in names[1:]},
    )


def verdict(measured: Benchmark, baseline: Benchmark) -> str:
    """`compare_to`: Student's t-test of all values at 95 %, or "Not significant!"."""
    from pyperf._compare import CompareData, CompareResult

    compared = CompareResult(CompareData("baseline", baseline), CompareData("measured", measured))
    if not compared.significant:
        return "unclear"
    return "faster" if compared.norm_mean < 1 else "slower"
