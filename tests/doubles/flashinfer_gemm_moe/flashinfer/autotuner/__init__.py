"""flashinfer/autotuner/autotuner.py: the context manager; there is one tactic here, and nothing to tune."""

from __future__ import annotations

import contextlib


@contextlib.contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | None = None,
    tuning_buckets: tuple[int, ...] | None = None,
    round_up: bool | None = None,
    skip_ops: str | set[str] | None = None,
):
    if tuning_buckets is not None and len(tuning_buckets) == 0:
        raise ValueError("tuning_buckets must hold at least one value")
    yield
