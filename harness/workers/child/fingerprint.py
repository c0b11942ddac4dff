"""Fingerprint of what ran, beyond its names: by which two calls of one name can be told apart."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

CODE = ("cubin", "hsaco")


def fingerprint(call: Callable[[], None], kind: str, kernels: Collection[str]) -> list[str]:
    """`onednn matmul brg:avx512_core_bf16`: the implementations that oneDNN, as torch has it, took in a call,
    or `onednn none`, on a CPU; `code gemm_kernel 1f03ab..`: a hash of the machine code of each Triton kernel
    of these names, on a GPU."""
    return _onednn(call) if kind == "cpu" else _triton(call, kernels)


def _onednn(call: Callable[[], None]) -> list[str]:
    import torch

    if not torch.backends.mkldnn.is_available():
        return []
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        log = _said(call)
    return onednn_names(log.splitlines())


def onednn_names(lines: Collection[str]) -> list[str]:
    """Of oneDNN's verbose lines, each primitive with its implementation once."""
    names: dict[str, None] = {}
    for line in lines:
        if match := re.match(r"onednn_verbose,(?:[^,]*,)*?exec,\w+,(\w+),([^,]+),", line):
            names[f"onednn {match[1]} {match[2]}"] = None
    return list(names) or ["onednn none"]


def _said(call: Callable[[], None]) -> str:
    """What a call writes to file descriptor 1, C libraries too."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            call()
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode(errors="replace")


def _triton(call: Callable[[], None], kernels: Collection[str]) -> list[str]:
    """Of those that a call launches. Where something else launches them, as torch.compile does, of all that
    this process compiled under a name, those of other sizes too."""
    if "triton" not in sys.modules:
        return []
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    ran: list[CompiledKernel] = []
    run = JITFunction.run

    def noted(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        compiled = run(self, *arguments, **options)
        if compiled is not None:  # as hooks of the compiler may want it
            ran.append(compiled)
        return compiled

    JITFunction.run = noted
    try:
        call()
    finally:
        JITFunction.run = run
    launched = {compiled.metadata.name for compiled in ran}
    # By type(): isinstance asks a weak proxy for its class, which raises where the referent is gone.
    compiled = [o for o in gc.get_objects() if issubclass(type(o), CompiledKernel)]
    ran += [each for each in compiled if each.metadata.name not in launched]
    return sorted({_code(each) for each in ran if each.metadata.name in kernels} - {""})


def _code(compiled: CompiledKernel) -> str:
    code = next((compiled.asm[kind] for kind in CODE if kind in compiled.asm), None)
    if code is None:
        return ""
    data = Path(code).read_bytes() if isinstance(code, Path) else code
    return f"code {compiled.metadata.name} {hashlib.sha256(data).hexdigest()[:12]}"
