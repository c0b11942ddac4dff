"""The judge's process, ready to compute references and to compare outputs with them."""

from __future__ import annotations

from pathlib import Path

from harness.workers.child import JUDGE
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.platform import Platform


def start_judge(platform: Platform, threads: int, deadline: float, log: Path) -> WorkerProcess:
    """deadline: seconds to import torch and reach the device. Raises WorkerFailure."""
    # Nobody times it, and it computes beside those who prepare: its threads are not bound and do not spin.
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    judge = WorkerProcess(JUDGE, environment if platform.kind == "cpu" else {}, log)
    try:
        judge.hello(platform, threads, deadline)
    except WorkerFailure:
        judge.kill()
        raise
    return judge
