"""What the suite's own Triton kernels share: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from kernels import platform as platforms
from kernels.formats import native
from kernels.lazy import torch
from kernels.op import Call, Implementation, Prepared, Unsupported
from kernels.operands import Operands
from kernels.platform import Platform, version
from kernels.support import Support, need
from kernels.tuning import Choice, Target, Tunable, words
from kernels.vendor import is_older

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

INTERPRETER = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables for Triton's interpreter. It computes with numpy, which gets one thread: on small
products several threads wait for each other, and take three times as long where other processes run."""

NOT_INTERPRETED = (
    "Triton runs on a CPU only interpreted: set TRITON_INTERPRET=1 before it is imported, or take the base "
    "class kernels.triton_runtime.TritonImplementation, which does that"
)

CPU = Target("cpu", "cpu", 64)
"""The interpreter. It has no compute units. Kernels that split their work among the units do so for 64."""


def options(warps: int, stages: int, instruction: int = 0) -> dict[str, int]:
    """Triton's options of a launch. instruction: rows of AMD's matrix instruction, 0 for other vendors"""
    common = {"num_warps": warps, "num_stages": stages}
    return {**common, "matrix_instr_nonkdim": instruction} if instruction else common


def target_of(device: torch.device) -> Target:
    """The target that a device of this machine is; CPU for the interpreter."""
    if device.type == "cpu":
        return CPU
    gpu = platforms.of(device)
    units = torch.cuda.get_device_properties(device).multi_processor_count
    return Target(gpu.kind, gpu.arch, units, gpu.name)


def require_interpreter(device: torch.device) -> None:
    """Raises Unsupported on a CPU where Triton does not or cannot interpret."""
    if device.type != "cpu":
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise Unsupported(NOT_INTERPRETED)
    support = interpreter_fits()
    if not support.ok:
        raise Unsupported(support.reason)


def interpreter_fits() -> Support:
    """Whether the interpreter works with the installed NumPy. Before Triton 3.7 it uses an array of one value
    as a number (`__index__` in triton/runtime/interpreter.py). NumPy 2.4 and later refuse that."""
    triton = version("triton") or ""
    numpy = version("numpy") or ""
    uses_arrays_as_numbers = is_older(triton, "3.7")
    return need(
        not uses_arrays_as_numbers or is_older(numpy, "2.4"),
        f"the interpreter of Triton {triton} needs numpy before 2.4, this is {numpy}: "
        "install that, or Triton 3.7 or later",
    )


def require_format(fp8: str, target: Target) -> None:
    """Raises Unsupported where a GPU's matrix instructions take another FP8 format than this one."""
    native_format = native(target.arch)
    if target.kind != "cpu" and fp8 != native_format:
        raise Unsupported(f"products of {fp8} need another GPU; {target.arch} takes {native_format}")


class TritonImplementation(Implementation):
    """A Triton kernel. On a CPU it is interpreted: checked, but never timed."""

    requires = "Triton (on cpu through its interpreter: checked, never timed)"
    runtime = "triton"

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.library("torch"), platform.library("triton"))

    def interpreted(self, platform: Platform) -> bool:
        return platform.kind == "cpu"

    def environment(self, platform: Platform) -> dict[str, str]:
        return dict(INTERPRETER) if platform.kind == "cpu" else {}


class ConfiguredPrepared(Prepared):
    """A call of the suite's Triton kernels with a configuration, which the record names."""

    choice: Choice
    launches: Sequence[Call]
    """The kernels that a call launches, in order. Together they write `written`."""

    def __init__(
        self, operands: Operands, out: torch.Tensor, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        super().__init__(operands, out, inputs=inputs)
        self.interpreted = out.device.type == "cpu"
        self.written = self.written_for(out)
        """The tensor that the kernels write: `out`, or one from which `call` rounds `out`."""

    def written_for(self, narrow: torch.Tensor) -> torch.Tensor:
        """The tensor that a kernel writes in place of `narrow`: on a GPU `narrow` itself. The interpreter
        truncates where it should round, so it writes fp32, from which the caller rounds to `narrow`."""
        return torch.zeros_like(narrow, dtype=torch.float32) if self.interpreted else narrow

    def readable(self, codes: torch.Tensor) -> torch.Tensor:
        """FP8 operands as the kernel reads them: e4m3fnuz as uint8 in the interpreter (kernels.fp8_jit)."""
        if self.interpreted and codes.dtype == torch.float8_e4m3fnuz:
            return codes.view(torch.uint8)
        return codes

    def call(self) -> None:
        for launch in self.launches:
            launch()
        if self.written is not self.out:
            self.out.copy_(self.written)

    def picked(self) -> str:
        return f"{words(self.choice.config)} ({self.choice.origin})"


class SuiteTriton(TritonImplementation, Tunable):
    """A Triton kernel of the suite. It can tell what it would launch on any target."""

    older_instructions: ClassVar[Mapping[str, str]] = {}
    """For each kernel whose tiles have too few rows for wgmma and tcgen05: why mma.sync is good enough."""

    def prepare(self, operands: Operands, out: torch.Tensor) -> Prepared:
        assert out is not None
        require_interpreter(out.device)
        return self.prepare_for(target_of(out.device), operands, out)

    def prepare_for(self, target: Target, operands: Operands, out: torch.Tensor) -> ConfiguredPrepared:
        """As prepare, for any target. The tensors may be on torch's meta device, so that what the call would
        launch can be compiled on any machine. Raises Unsupported."""
        choice = self.choose(target, operands.sizes)
        prepared = self.prepare_with(choice.config, target, operands, out)
        prepared.choice = choice
        return prepared

    @abstractmethod
    def prepare_with(
        self, config: DataclassInstance, target: Target, operands: Operands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        """As prepare_for, with this configuration. The interpreter takes any configuration: it uses the
        constants that change what is computed, and ignores Triton's options."""
