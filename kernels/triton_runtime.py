"""What the suite's own Triton kernels share: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kernels.op import Implementation, Support, Unsupported
from kernels.platform import Platform

if TYPE_CHECKING:
    import torch

# One thread for numpy, with which Triton interprets: on products this small more of them wait for each
# other, three times as long where other processes run.
INTERPRETER = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}


def kind_of(device: torch.device) -> str:
    """The platform that a device belongs to: cpu, cuda or rocm."""
    import torch

    return "cpu" if device.type == "cpu" else "rocm" if torch.version.hip else "cuda"


def require_interpreter(device: torch.device) -> None:
    """Raises Unsupported on a CPU where Triton would not interpret."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise Unsupported(
            "Triton runs on a CPU only interpreted: set TRITON_INTERPRET=1 before it is imported"
        )


class TritonImplementation(Implementation):
    """A Triton kernel, which a CPU checks through the interpreter and never times."""

    requires = "Triton (on cpu through its interpreter: checked, never timed)"
    runtime = "triton"

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.library("torch"), platform.library("triton"))

    def interpreted(self, platform: Platform) -> bool:
        return platform.kind == "cpu"

    def environment(self, platform: Platform) -> dict[str, str]:
        return dict(INTERPRETER) if platform.kind == "cpu" else {}
