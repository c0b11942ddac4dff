"""pytest-benchmark with the suite's own check and timing: the fixture `kernel_benchmark`.

    def test_mine(kernel_benchmark):
        kernel_benchmark("mla_decode", my_kernel, case="batch=16 ctx=4096 heads=16")

The kernel is checked against the op's reference, timed in samples by the device's own timer, as `run` times
it, and checked again; a wrong kernel fails its test. pytest-benchmark saves, compares and plots seconds per
call on the device, because it reads a clock that each sample advances by this time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from harness.files import JsonObject
    from harness.run.single import SingleEntry

ROUNDS = 20  # samples of a kernel


class DeviceClock:
    """A clock in seconds that stands still, except that a sample adds its time to `now`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel_benchmark", "kernels: which op, implementations, cases, and where")
    group.addoption("--kernel-op", metavar="OP,...", help="Skip the benchmarks of other ops.")
    group.addoption("--kernel-impl", metavar="PATTERN,...", help="Skip rows that do not match.")
    group.addoption("--kernel-suite", metavar="NAME", default="smoke", help="Cases of the suite's own rows.")
    group.addoption("--kernel-case", metavar='"NAME=V ..."', action="append", help="Instead of a suite.")
    group.addoption("--kernel-device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: the first GPU).")
    group.addoption("--kernel-cache", choices=["serving", "cold", "warm"], default="serving")
    group.addoption("--kernel-launch", choices=["graph", "eager"], help="On GPUs (default: graph).")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives pytest-benchmark's fixture the device clock, which it takes from a test's first marker."""
    for item in items:
        if "kernel_benchmark" in getattr(item, "fixturenames", ()):
            marker = item.get_closest_marker("benchmark")
            options = dict(marker.kwargs) if marker else {}
            item.add_marker(pytest.mark.benchmark(**options | {"timer": DeviceClock()}), append=False)


@pytest.fixture
def kernel_benchmark(
    benchmark: BenchmarkFixture, request: pytest.FixtureRequest
) -> Iterator[Callable[..., JsonObject]]:
    """A function that checks and times a kernel: `kernel_benchmark(op, kernel, rounds=20, case=...)`. It
    returns what a record of the kernel would have besides times.

    kernel: the name of one of the suite's implementations, which is measured in a process of its own; or a
            kernel that is measured in this process: what `implementation` of kernels.op made, or a function
            of (operands, out) that fills `out`, returns the output, or returns the call to be timed
    """
    from harness.errors import HarnessError
    from harness.machine.device import choose_device
    from harness.run import single

    clock = next(m.kwargs["timer"] for m in request.node.iter_markers("benchmark") if "timer" in m.kwargs)
    options = request.config.option
    try:
        device = choose_device(options.kernel_device)
    except HarnessError as error:  # pytest.fail would print this exception, too
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
        defaults = {"cache": options.kernel_cache, "launch": options.kernel_launch}

        def measure(op: str, kernel: object, *, rounds: int = ROUNDS, **run_options: str) -> JsonObject:
            """run_options: `case`, `boundary`, `cache` and `launch`, as `run` takes them"""
            __tracebackhide__ = True
            try:
                log = Path(scratch) / "worker.log"
                measured = single.benchmark(device, op, kernel, log, **defaults | run_options)
            except HarnessError as error:
                raise pytest.fail.Exception(str(error), pytrace=False) from None
            for patterns, name in ((options.kernel_op, op), (options.kernel_impl, measured.entry.impl.name)):
                if patterns and not any(fnmatchcase(name, pattern) for pattern in patterns.split(",")):
                    pytest.skip(f"{name} is not asked for: {patterns}")
            try:
                measured.begin()
                _accept(measured)
                benchmark.group = benchmark.group or measured.case.key

                def sample() -> None:
                    clock.now += measured.sample()

                benchmark.pedantic(sample, rounds=rounds, iterations=1, warmup_rounds=1)
                # pytest-benchmark keeps no time of a benchmark with an error; the last check may still fail.
                benchmark.has_error = True
                measured.end()
                _accept(measured)
                benchmark.has_error = False
                median_s = benchmark.stats.stats.median if benchmark.stats else None
                benchmark.extra_info.update(measured.facts(median_s))
            finally:
                measured.close()
            return dict(benchmark.extra_info)

        yield measure


def _accept(measured: SingleEntry) -> None:
    """Skips the test of a kernel that cannot run, and fails that of one that is wrong."""
    __tracebackhide__ = True
    entry = measured.entry
    if entry.status == "unsupported":
        pytest.skip(entry.reason)
    if entry.status is not None:
        pytest.fail(f"{entry.name} is {entry.status}: {entry.reason}", pytrace=False)
