"""Made-up worlds for `decide`: an engine with rules of its own, cases whose true times are known, and runs of
them that were measured on a simulated machine by the rules of `run`."""

import functools
import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.decide.measured import BOUNDARIES, Measured, Row, Sheet
from harness.decide.mix import Mix, WeighedCase
from harness.results.schema import Cell, PlannedCase, Samples
from harness.statistics.multiple import log_time
from harness.statistics.paired import compare, noise_of
from kernels import engines
from shapes.case import Case
from tests.support.simulated_machine import Machine, Noise

ARCH, ENGINE = "sm_90", "vllm"
ROWS = {
    "mla_decode": {"": "mla.default", "--attention-backend A": "mla.a", "--attention-backend B": "mla.b",
                   "VLLM_BOTH=1": "mla.both"},
    "fused_moe": {"": "moe.default", "--moe-backend A": "moe.a", "--moe-backend B": "moe.b",
                  "--moe-backend C": "moe.c", "VLLM_BOTH=1": "moe.both"},
    "block_scale_gemm": {"": "gemm.default", "VLLM_GEMM=1": "gemm.a"},
}  # fmt: skip
"""By op: what the engine runs with which flags."""
SIZE = {"mla_decode": "batch", "fused_moe": "tokens", "block_scale_gemm": "m"}
OTHER_SIZES: Mapping[str, Mapping[str, Any]] = {
    "mla_decode": {"ctx": 4096, "heads": 16},
    "fused_moe": {"experts": 256, "topk": 8, "hidden": 7168, "inter": 256},
    "block_scale_gemm": {"n": 2112, "k": 7168},
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LARGEST = math.log(1.3)
"""Of an effect, in logarithms."""


def set_rules(
    monkeypatch: pytest.MonkeyPatch, rows: Mapping[str, Mapping[str, str]] = ROWS, **more: Mapping[str, Any]
) -> None:
    """The engine has these rules alone. rows: by op, what it runs with which flags; more: facts of the entry
    of a row, by the row's name with _ in place of a point"""
    entries = [
        {"op": op, "archs": [ARCH], "row": row, "file": "engine.py", "line": 1, "function": "choose",
         "why": "made up", "flags": flags, **more.get(row.replace(".", "_"), {})}
        for op, by_flags in rows.items() for flags, row in by_flags.items()
    ]  # fmt: skip
    made = {"version": "1.0", "triton": "3.0", "default": entries}
    engines.defaults.cache_clear()
    monkeypatch.setattr(engines, "facts", lambda engine: made)
    # What the patch left in the cache must not outlive it.
    monkeypatch.setattr(engines, "defaults", functools.cache(engines.defaults.__wrapped__))


@dataclass(frozen=True)
class World:
    measured: Measured
    mix: Mix
    true_us: Mapping[tuple[str, str], Mapping[str, float]]
    """By case, then by row."""

    def time_us(self, settings: Mapping[str, str]) -> float:
        """The true time of a mean step under a launch."""
        return sum(each.calls * self.true_us[each.key][_row(each.op, settings)] for each in self.mix.cases)

    def regret(self, settings: Mapping[str, str]) -> float:
        """What a launch takes more than the best launch there is, as a share of that."""
        return self.time_us(settings) / min(map(self.time_us, _launches())) - 1


def _row(op: str, settings: Mapping[str, str]) -> str:
    given = {f"--{name} {value}" if name.islower() else f"{name}={value}" for name, value in settings.items()}
    return next((row for flags, row in ROWS[op].items() if flags in given), ROWS[op][""])


def _launches() -> list[dict[str, str]]:
    """All combinations of flags."""
    values: dict[str, list[str]] = {}
    for flags in dict.fromkeys(flags for by_flags in ROWS.values() for flags in by_flags if flags):
        name, _, value = flags.removeprefix("--").replace("=", " ").partition(" ")
        values.setdefault(name, []).append(value)
    every = itertools.product(*([(name, value) for value in ("", *of)] for name, of in values.items()))
    return [{name: value for name, value in launch if value} for launch in every]


def world(seed: int, equal: bool = False) -> World:
    """Effects of rows against the default: none, a gain or loss of up to 30 % at all sizes, or one that turns
    along the sizes. equal: all rows take the same time."""
    draw = random.Random(seed)
    noise = Noise(
        own=draw.choice((0.003, 0.01, 0.02, 0.03)), offset=draw.choice((0.0, 0.001, 0.003, 0.005)),
        spikes=draw.choice((0.0, 0.03)),
    )  # fmt: skip
    sheets: dict[tuple[str, str], list[Sheet]] = {}
    true: dict[tuple[str, str], dict[str, float]] = {}
    weighed: list[WeighedCase] = []
    for op, by_flags in ROWS.items():
        effects = {row: (lambda x: 0.0) if equal else _effect(draw) for row in by_flags.values()}
        effects[by_flags[""]] = lambda x: 0.0
        scale = draw.uniform(20, 200)
        for size in sorted(draw.sample(BATCHES, draw.randint(3, len(BATCHES)))):
            case = Case(op, {SIZE[op]: size, **OTHER_SIZES[op]}, weight=1.0)
            key = (op, case.text)
            us = scale * (1 + size**0.7 / 8)
            place = math.log(size) / math.log(BATCHES[-1])
            true[key] = {row: us * math.exp(effect(place)) for row, effect in effects.items()}
            sheets[key] = [_sheet(case, true[key], noise, draw.randrange(10**6), by_flags[""])]
            weighed.append(WeighedCase(key, case.sizes, decode=draw.uniform(0.5, 60)))
    measured = Measured(sheets, "A machine", ARCH, [Path("made-up")], [])
    return World(measured, Mix("made up", weighed, counts_calls=True), true)


def _effect(draw: random.Random):
    """The logarithm of a row's time over the default's, by the place of the size, 0 to 1."""
    kind, most = draw.choice(("none", "shift", "shift", "turn")), draw.uniform(-LARGEST, LARGEST)
    if kind == "none":
        return lambda place: 0.0
    return (lambda place: most) if kind == "shift" else (lambda place: most * (1 - 2 * place))


def _sheet(case: Case, true_us: Mapping[str, float], noise: Noise, seed: int, baseline: str) -> Sheet:
    seconds = {row: us / 1e6 for row, us in true_us.items()} | {"rerun": true_us[baseline] / 1e6}
    rounds = Machine(seconds, noise, seed).measured(
        baseline=baseline, rerun="rerun", budget_s=20.0, seed=seed
    )
    rows = []
    for row in true_us:
        series = rounds.series(row)
        samples = Samples(block=rounds.blocks, round=[each.index for each in rounds.rounds], seconds=series)
        us = math.exp(log_time(series, rounds.blocks)) * 1e6
        cell = Cell(
            op=case.op, case=case.key, boundary=BOUNDARIES[0], impl=row, platform="cuda", arch=ARCH,
            setting="plain", launch="graph", cache="serving", status="ok", time_us=us, samples=samples,
        )  # fmt: skip
        rows.append(Row(cell, {}))
    pair = compare(rounds.series("rerun"), rounds.series(baseline), blocks=rounds.blocks)
    planned = PlannedCase(
        op=case.op, sizes=dict(case.sizes), boundary=BOUNDARIES[0], place="ad hoc", weight=1.0, key=case.key
    )
    return Sheet(Path("made-up"), "ad hoc", planned, rows, {}, frozenset(), noise_of(pair))
