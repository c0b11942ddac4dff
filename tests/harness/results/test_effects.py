"""Effects of flags, from made-up rounds whose effects are known."""

import itertools
import math
import random

import pytest

from harness.results.effects import changes, effects, regressions
from harness.results.schema import Cell, Samples
from tests.support.written_runs import a_cell, case, verdict
from tests.support.written_runs import cell as timed

BLOCKS, ROUNDS = 8, 5


def cell(setting: str, seconds: list[float], **facts) -> Cell:
    block = [b for b in range(BLOCKS) for _ in range(ROUNDS)]
    rounds = list(range(ROUNDS)) * BLOCKS
    samples = Samples(block=block, round=rounds, seconds=seconds)
    return a_cell(setting=setting, samples=samples, **facts)


def factorial(a: float, b: float, both: float, noise: float = 0.01):
    """Settings of A=0,1 x B=0,1 whose times fall by these factors, with noise that rounds share and their
    own."""
    draw = random.Random(1)
    shared = [draw.gauss(0, 0.1) for _ in range(BLOCKS * ROUNDS)]
    settings = {f"A={x}, B={y}": {"A": str(x), "B": str(y)} for x, y in itertools.product((0, 1), (0, 1))}
    cells = {}
    for setting, values in settings.items():
        factor = a ** int(values["A"]) * b ** int(values["B"])
        factor *= both if values == {"A": "1", "B": "1"} else 1
        cells[setting] = cell(setting, [math.exp(s + draw.gauss(0, noise)) / factor for s in shared])
    return cells, settings


def test_main_effects_and_the_interaction_are_found():
    cells, settings = factorial(a=2.0, b=1.0, both=1.3)
    samples = cells["A=1, B=1"].samples
    for column in (samples.block, samples.round, samples.seconds):
        del column[:2]  # rounds that one setting lacks count for none
    found = {e.what: e for e in effects(cells, settings, noise=0.0, confidence=0.95)}
    assert list(found) == ["A: 0 -> 1", "B: 0 -> 1", "A=1 with B=1"]
    assert found["A: 0 -> 1"].comparison.ratio == pytest.approx(2 * math.sqrt(1.3), rel=0.01)
    assert found["B: 0 -> 1"].comparison.ratio == pytest.approx(math.sqrt(1.3), rel=0.01)
    assert found["A=1 with B=1"].comparison.ratio == pytest.approx(1.3, rel=0.02)
    assert {e.kind for e in found.values()} == {"main", "interaction"}
    assert all(e.comparison.verdict == "faster" for e in found.values())


def test_what_does_nothing_has_no_effect_and_a_factorial_with_a_hole_none():
    cells, settings = factorial(a=0.5, b=1.0, both=1.0, noise=0.001)
    verdicts = {e.what: e.comparison.verdict for e in effects(cells, settings, noise=0.0, confidence=0.95)}
    assert verdicts == {"A: 0 -> 1": "slower", "B: 0 -> 1": "same", "A=1 with B=1": "same"}
    whole = settings.pop("A=1, B=1")
    assert effects(cells, settings, 0.0, 0.95) == []
    cells["A=1, B=1"].samples = Samples()
    assert effects(cells, settings | {"A=1, B=1": whole}, 0.0, 0.95) == []


def test_a_slower_rerun_of_the_baseline_is_noise_and_no_regression():
    a, b = timed(case(), "a", 1.0), timed(case(), "b", 1.1)
    found = [verdict(a, b, word, about) for word in ("slower", "same") for about in ("A/A", "baseline")]
    assert regressions(found) == [found[1]]


def test_three_values_are_held_against_the_first():
    settings = {f"A={v}": {"A": v} for v in ("0", None, "")}
    cells = {setting: cell(setting, [1.0 / (1 + i)] * BLOCKS * ROUNDS) for i, setting in enumerate(settings)}
    found = effects(cells, settings, 0.0, 0.95)
    speedups = {e.what: round(e.comparison.ratio, 6) for e in found}
    assert speedups == {"A: 0 -> unset": 2.0, "A: 0 -> ''": 3.0}


BEFORE = {"kernels": ["gemm", "copy"], "kernel_us": [99.0, 1.0], "ran": ["onednn matmul brg:avx512"]}


@pytest.mark.parametrize(("after", "expected"), [
    ({"kernels": ["gemm"], "kernel_us": [99.0]}, ""),
    ({"kernels": ["copy", "gemm"], "kernel_us": [5.4, 94.0]}, ""),
    ({"kernels": ["slow", "copy"], "kernel_us": [99.0, 1.0]}, "gemm -> slow"),
    ({"ran": ["onednn none"]}, "onednn matmul brg:avx512 -> onednn none"),
    ({"picked": "tile 2"}, "nothing -> tile 2"),
])  # fmt: skip
def test_what_ran_is_told_apart(after, expected):
    """A kernel that takes next to nothing may be missing from a list."""
    one, other = cell("plain", [1.0] * 40, **BEFORE), cell("A=1", [1.0] * 40, **(BEFORE | after))
    assert changes(one, other) == expected
