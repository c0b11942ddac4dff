"""The suite's own Triton kernels are right in the interpreter: each third case of the ops' test_triton.py,
and those of test_quantise.py. One process runs all, as it takes seconds to import torch and Triton."""

from pathlib import Path

import pytest

import kernels
from tests.support.interpreting import found_interpreted

pytest.importorskip("triton")

HERE = Path(__file__).parent
SCRIPTS = [HERE / "test_quantise.py", *(HERE / op / "test_triton.py" for op in kernels.OPS)]


def test_interpreted() -> None:
    found = found_interpreted("third", *map(str, SCRIPTS))
    assert len(found) > 20
    assert [case for case in found if any(case[1:])] == []
