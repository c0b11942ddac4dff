"""The Triton of images with torch 2.11, 3.6, compiles and interprets what the suite ships, as that of
constraints.txt does; `make test-all` fetches it. This file as a script compiles.
"""

import json
import os
import subprocess
import sys

import pytest

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.compiler import compile_launch
from harness.compile.launches import KernelLaunch, cases_of_suites, launches
from harness.compile.survey import violations
from harness.paths import ROOT
from tests.support.interpreting import wrong_interpreted

pytestmark = pytest.mark.slow

OTHER, VERSION = ROOT / ".other-triton", "3.6.0"


def of_each_kind(op: str, target: str) -> list[KernelLaunch]:
    """Of the launches of a kernel that differ in sizes alone, the last."""
    kinds: dict[tuple[str, ...], KernelLaunch] = {}
    for launch in launches(op, architectures()[target], cases_of_suites(op)):
        values = json.loads(launch.data)["constant_vals"]
        flags = [str(value) for value in values if value is None or isinstance(value, bool)]
        kinds[(launch.name, *flags)] = launch
    return list(kinds.values())


@pytest.mark.parametrize(("op", "target"), list(zip(kernels.OPS, reversed(architectures()), strict=True)))
def test_what_is_shipped_may_be(op, target):
    """Each op for another architecture than by this environment's own (harness/compile/test_compile.py)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (OTHER, ROOT)))}
    command = [sys.executable, __file__, op, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [VERSION], done.stderr


@pytest.mark.parametrize("op", kernels.OPS)
def test_what_is_interpreted_is_right(op, monkeypatch):
    """The first cases of the op's own tests."""
    monkeypatch.setenv("PYTHONPATH", str(OTHER))
    assert wrong_interpreted(str(ROOT / "tests" / "kernels" / op / "test_triton.py"), "few") == []


def main(op: str, target: str) -> None:
    """Prints Triton's version, and what must not be shipped."""
    import triton

    print(triton.__version__)
    for launch in of_each_kind(op, target):
        figures = compile_launch(launch.kernel, target, launch.data)
        for reason in violations(launch, figures, architectures()[target]):
            print(launch.name, launch.config, reason)


if __name__ == "__main__":
    main(*sys.argv[1:])
