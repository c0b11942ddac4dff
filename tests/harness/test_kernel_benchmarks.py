"""`pytest --benchmark-only`: each op, implementation and case of a suite that can be timed here, a benchmark.

Which ones: --kernel-op, --kernel-impl, --kernel-suite or --kernel-case (harness/pytest_plugin.py).
"""

from collections.abc import Iterator

import pytest

import kernels
from harness.plan import select
from kernels.platform import detect


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = metafunc.config.option.benchmark_only and "implementation" in metafunc.fixturenames
    found = list(_benchmarks(metafunc.config.option)) if wanted else []
    metafunc.parametrize("op, implementation, case, boundary", found)


def _benchmarks(options) -> Iterator:
    platform = detect(options.kernel_device)
    for name in options.kernel_op.split(",") if options.kernel_op else kernels.OPS:
        op = select.choose_op(name)
        texts = options.kernel_case or ()
        for case in select.choose_cases(op, options.kernel_suite, texts, None, platform.arch):
            for found in select.choose_implementations(op, options.kernel_impl):
                if found.supports(case, platform).ok and not found.interpreted(platform):
                    parts = (name, found.name, case.text, case.boundary)
                    yield pytest.param(*parts, id=" ".join(parts))


def test_kernel(kernel_benchmark, op: str, implementation: str, case: str, boundary: str) -> None:
    kernel_benchmark(op, implementation, case=case, boundary=boundary)
