"""Routing log: which experts each token went to, by step and layer, kept in memory, written now and then."""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import report

LARGEST_STEP = 64  # tokens: decode steps; of a prefill only the counts by expert are kept
EVERY_S = 2.0


def record() -> None:
    """Wraps the CPU router. KERNEL_BENCH_ROUTING_LOG: a folder; one npz for each process that routes."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    log = _Log(Path(os.environ["KERNEL_BENCH_ROUTING_LOG"]))
    compute = CPURouter._compute_routing

    def _compute_routing(self, *args, **named):
        weights, ids = compute(self, *args, **named)
        log.add(id(self), ids, self.global_num_experts)
        return weights, ids

    CPURouter._compute_routing = _compute_routing
    report.note("replaced", swap="routing log", layers="all")


class _Log:
    """layer: routers in the order of their first call; a step begins where the first is called again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layers: dict[int, int] = {}
        self.step = -1
        self.entries: list[tuple[float, int, int, np.ndarray]] = []
        self.prefills: list[tuple[float, int, int, np.ndarray]] = []
        self.written = time.monotonic()
        atexit.register(self.write)

    def add(self, router: int, ids: Any, experts: int) -> None:
        layer = self.layers.setdefault(router, len(self.layers))
        self.step += layer == 0
        picks = ids.numpy()
        if len(picks) <= LARGEST_STEP:
            self.entries.append((time.time(), self.step, layer, picks.astype(np.int16).copy()))
        else:
            counts = np.bincount(picks.ravel(), minlength=experts).astype(np.int32)
            self.prefills.append((time.time(), self.step, layer, counts))
        if layer == 0 and time.monotonic() - self.written > EVERY_S:
            self.write()

    def write(self) -> None:
        """routing-PID.npz: of decode steps time, step, layer, tokens, and ids [sum of tokens, picks]; of
        prefills the same with counts [entries, experts]."""
        if not self.entries and not self.prefills:
            return
        scratch = self.folder / f"routing-{os.getpid()}.writing.npz"
        np.savez_compressed(
            scratch,
            time=np.array([e[0] for e in self.entries]),
            step=np.array([e[1] for e in self.entries], dtype=np.int64),
            layer=np.array([e[2] for e in self.entries], dtype=np.int32),
            tokens=np.array([len(e[3]) for e in self.entries], dtype=np.int32),
            ids=np.concatenate([e[3] for e in self.entries]) if self.entries else np.zeros((0, 0), np.int16),
            prefill_time=np.array([e[0] for e in self.prefills]),
            prefill_step=np.array([e[1] for e in self.prefills], dtype=np.int64),
            prefill_layer=np.array([e[2] for e in self.prefills], dtype=np.int32),
            prefill_counts=np.array([e[3] for e in self.prefills], dtype=np.int32),
        )
        scratch.rename(self.folder / f"routing-{os.getpid()}.npz")
        self.written = time.monotonic()
