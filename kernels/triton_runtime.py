"""What the suite's own Triton kernels share: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kernels import platform as platforms
from kernels.op import Implementation, Prepared, Unsupported
from kernels.operands import Operands
from kernels.platform import Platform, version
from kernels.support import Support, need
from kernels.tuning import Choice, Target, Tunable, words
from kernels.vendor import is_older

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

# One thread for numpy, with which Triton interprets: on products this small more of them wait for each
# other, three times as long where other processes run.
INTERPRETER = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}


CPU = Target("cpu", "cpu", 64)
"""The interpreter. Compute units are of no meaning to it: enough that it sees several splits."""


def options(warps: int, stages: int, instruction: int = 0) -> dict[str, int]:
    """Triton's options; instruction: rows of AMD's matrix instruction, 0 elsewhere."""
    common = {"num_warps": warps, "num_stages": stages}
    return common | {"matrix_instr_nonkdim": instruction} if instruction else common


def target_of(device: torch.device) -> Target:
    """The device that a tensor is on."""
    if device.type == "cpu":
        return CPU
    import torch

    gpu, units = platforms.of(device), torch.cuda.get_device_properties(device).multi_processor_count
    return Target(gpu.kind, gpu.arch, units, gpu.name)


def kind_of(device: torch.device) -> str:
    """The platform that a device belongs to: cpu, cuda or rocm."""
    import torch

    return "cpu" if device.type == "cpu" else "rocm" if torch.version.hip else "cuda"


def require_interpreter(device: torch.device) -> None:
    """Raises Unsupported on a CPU where Triton would not or cannot interpret."""
    if device.type != "cpu":
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise Unsupported(
            "Triton runs on a CPU only interpreted: set TRITON_INTERPRET=1 before it is imported"
        )
    if not (support := interpreter_fits()).ok:
        raise Unsupported(support.reason)


def interpreter_fits() -> Support:
    """Whether the interpreter works with the installed NumPy. Before Triton 3.7 it takes an array of one
    value for a number (`__index__` in triton/runtime/interpreter.py), which NumPy refuses from 2.4 on."""
    triton, numpy = version("triton") or "", version("numpy") or ""
    return need(
        not is_older(triton, "3.7") or is_older(numpy, "2.4"),
        f"the interpreter of Triton {triton} needs numpy before 2.4, this is {numpy}: "
        "install that, or Triton 3.7 or later",
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


class ConfiguredPrepared(Prepared):
    """Prepared under a configuration, which the record says."""

    choice: Choice

    def picked(self) -> str:
        return f"{words(self.choice.config)} ({self.choice.origin})"


class SuiteTriton(TritonImplementation, Tunable):
    """One of the suite's own, which can be asked what it would launch on any target.

    older_instructions: kernel -> why its tiles of too few rows for wgmma and tcgen05 make do with mma.sync
    """

    older_instructions: ClassVar[Mapping[str, str]] = {}

    def prepare(self, operands: Operands, out: torch.Tensor) -> Prepared:
        assert out is not None
        require_interpreter(out.device)
        return self.prepare_for(target_of(out.device), operands, out)

    def prepare_for(self, target: Target, operands: Operands, out: torch.Tensor) -> ConfiguredPrepared:
        """As prepare, for a target that tensors on torch's meta device may stand in for: what its calls
        would launch there can then be compiled anywhere. Raises Unsupported."""
        choice = self.choose(target, operands.sizes)
        prepared = self.prepare_with(choice.config, target, operands, out)
        prepared.choice = choice
        return prepared

    @abstractmethod
    def prepare_with(
        self, config: DataclassInstance, target: Target, operands: Operands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        """As prepare_for, under this configuration. On a CPU, interpreted, under any: the interpreter takes
        the constants that change what is computed, and lets Triton's options be."""
