"""The file that pytest-benchmark's user writes: one test for each callable."""

from __future__ import annotations

import json
import os

import pytest

from tools.engines.callables import VARIABLE, prepare


@pytest.mark.parametrize("name", json.loads(os.environ[VARIABLE]))
def test_call(benchmark, name):
    benchmark.extra_info["name"] = name
    benchmark(prepare(name))
