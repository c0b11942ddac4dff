"""Real serving processes: where vLLM can serve, and which processes a test has left, told by a mark."""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.serving.live.checkpoint.shape import ModelShape
from kernels.platform import detect

TINY = ModelShape(
    hidden=1024, q_lora=512, heads=4, layers=2, dense_width=512, experts=8, picks=4, groups=4,
    groups_picked=2, vocabulary=512, longest=1024,
)  # fmt: skip
MARK = "KERNEL_BENCH_TEST"

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or "avx512_bf16" not in detect("cpu").features,
    reason="vllm is not installed, or serves no FP8 model here: it needs AVX-512 with bf16",
)


def marked(mark: str) -> list[int]:
    """The living ones."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if ours and state not in "ZX":
            found.append(int(folder.name))
    return found


def comes(condition: Callable[[], object], within: float = 120.0) -> bool:
    """Whether it comes true in time: what a starved machine needs, where it fails only."""
    until = time.monotonic() + within
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def gone(mark: str) -> bool:
    return comes(lambda: not marked(mark))
