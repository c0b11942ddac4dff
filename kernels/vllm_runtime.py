"""What the kernels of vLLM's CPU build share: where they run, and how they are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kernels.op import Unsupported
from kernels.vendor import Vllm


class VllmCpu(Vllm):
    """A kernel that vLLM serves DeepSeek with on x86-64 servers.

    kernel: its name among vLLM's torch operators
    """

    requires = "vLLM's CPU build, AVX-512 (AMX tiles where the CPU has them)"
    kinds = ("cpu",)
    features = ("avx512f",)
    also: ClassVar = {}
    kernel: ClassVar[str]

    def bind(self, kernel: str | None = None) -> Callable:
        """The torch operator called `kernel`, by default the class's own. Raises Unsupported without it."""
        import torch

        name = kernel or self.kernel
        try:
            # Importing the module loads vLLM's library of operators.
            import vllm._custom_ops  # noqa: F401
        except ImportError as error:
            raise Unsupported(f"vllm cannot be imported: {error}") from error
        if not hasattr(torch.ops._C, name):
            raise Unsupported(f"this vllm has no {name} (not its CPU build, or no AVX-512)")
        return getattr(torch.ops._C, name)
