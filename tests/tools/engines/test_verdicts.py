"""What a user of each engine concludes, from measurements made up for it."""

from __future__ import annotations

import pytest

from tools.engines import pyperf_runner, pytest_session, torch_timer
from tools.engines.verdicts import by_estimate


def test_estimates_one_percent_apart_are_different():
    seconds = {"base": 1.0, "near": 1.0099, "slower": 1.01, "faster": 0.98, "as near": 0.9902}
    verdicts = {"near": "same", "slower": "slower", "faster": "faster", "as near": "same"}
    assert by_estimate(seconds, "base") == verdicts


def torch_measured(*seconds: float):
    from torch.utils.benchmark import Measurement
    from torch.utils.benchmark.utils.common import TaskSpec

    return Measurement(1, list(seconds), TaskSpec("call()", "pass"))


BASE = (0.99e-3, 1e-3, 1e-3, 1e-3, 1.01e-3)


@pytest.mark.parametrize(
    ("times", "verdict"),
    [(1.009, "same"), (1.02, "slower"), (0.98, "faster"), (0.995, "same"), (3.0, "slower")],
)
def test_compare_colours_what_is_within_one_percent_alike(times, verdict):
    assert torch_timer.verdict(torch_measured(*(times * s for s in BASE)), torch_measured(*BASE)) == verdict


def test_compare_warns_of_a_wide_measurement():
    wide = torch_measured(0.8e-3, 0.9e-3, 1.1e-3, 1.2e-3, 1.4e-3)
    assert torch_timer.verdict(wide, torch_measured(*BASE)) == "unclear"
    assert torch_timer.verdict(torch_measured(*BASE), wide) == "unclear"
    assert torch_timer.verdict(torch_measured(*(2 * s for s in BASE)), wide) == "slower"


@pytest.mark.parametrize(("times", "verdict"), [(1.009, "same"), (1.02, "slower"), (0.98, "faster")])
def test_pytest_benchmark_fails_a_median_one_percent_above(times, verdict):
    def stats(seconds: float) -> dict[str, float]:
        return {"median": seconds, "mean": 7.0, "min": 7.0}

    assert pytest_session.verdict(stats(times * 1e-3), stats(1e-3)) == verdict


@pytest.mark.parametrize(
    ("times", "scatter", "verdict"),
    [(1.02, 0.001, "slower"), (0.98, 0.001, "faster"), (1.02, 0.1, "unclear"), (1.0001, 0.001, "unclear")],
)
def test_pyperf_tests_significance(times, scatter, verdict):
    pyperf = pytest.importorskip("pyperf")

    def benchmark(seconds: float):
        values = [seconds * (1 + scatter * (place - 9.5) / 9.5) for place in range(20)]
        runs = [pyperf.Run(values[i : i + 2], collect_metadata=False) for i in range(0, 20, 2)]
        return pyperf.Benchmark([run._update_metadata({"name": "call"}) for run in runs])

    assert pyperf_runner.verdict(benchmark(times * 1e-3), benchmark(1e-3)) == verdict
