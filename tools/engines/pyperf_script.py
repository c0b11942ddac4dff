"""The script that pyperf's user writes, which it starts again for each of its worker processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pyperf

from tools.engines.callables import VARIABLE, prepare


def in_this_process(task: int, name: str, worker_task: int | None) -> Callable[[], object]:
    """A worker prepares the callable of its own task only, before any clock runs."""
    return prepare(name) if task == worker_task else str


def main() -> None:
    runner = pyperf.Runner()
    worker_task = runner.parse_args().worker_task
    for task, name in enumerate(json.loads(os.environ[VARIABLE])):
        runner.bench_func(name, in_this_process(task, name, worker_task))


if __name__ == "__main__":
    main()
