"""What the suite's own Triton kernels share: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kernels.op import Implementation, Prepared, Support, Unsupported
from kernels.platform import Platform

if TYPE_CHECKING:
    import torch

# One thread for numpy, with which Triton interprets: on products this small more of them wait for each
# other, three times as long where other processes run.
INTERPRETER = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}


Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Target:
    """What kernels are chosen for; it need not be here.

    kind:  cpu, cuda or rocm
    arch:  sm_90, gfx942 ...
    units: compute units (streaming multiprocessors)
    """

    kind: str
    arch: str
    units: int

    def choose(self, choices: Mapping[str, Choice]) -> Choice:
        """Of choices by architecture or kind: the architecture's own, if there is one."""
        return choices.get(self.arch, choices[self.kind])


def target_of(device: torch.device) -> Target:
    """The device that a tensor is on."""
    import torch

    kind = kind_of(device)
    if kind == "cpu":
        return Target(kind, kind, 1)
    found = torch.cuda.get_device_properties(device)
    arch = found.gcnArchName.split(":")[0] if kind == "rocm" else f"sm_{found.major}{found.minor}"
    return Target(kind, arch, found.multi_processor_count)


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


class SuiteTriton(TritonImplementation):
    """One of the suite's own, which can be asked what it would launch on any target.

    older_instructions: kernel -> why its tiles of too few rows for wgmma and tcgen05 make do with mma.sync
    """

    older_instructions: ClassVar[Mapping[str, str]] = {}

    def prepare(self, operands: Any, out: torch.Tensor | None) -> Prepared:
        assert out is not None
        require_interpreter(out.device)
        return self.prepare_for(target_of(out.device), operands, out)

    @abstractmethod
    def prepare_for(self, target: Target, operands: Any, out: torch.Tensor) -> Prepared:
        """As prepare, for a target that tensors on torch's meta device may stand in for: what its calls
        would launch there can then be compiled anywhere. Raises Unsupported."""
