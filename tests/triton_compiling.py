"""Compiles what a prepared call launches, for GPUs that need not be here."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

# Triton's name of a target, and its shared memory for one program in KiB.
TARGETS = {
    "gfx942": (("hip", "gfx942", 64), 64),
    "gfx950": (("hip", "gfx950", 64), 160),
    "sm_90": (("cuda", 90, 32), 227),
    "sm_100": (("cuda", 100, 32), 227),
}

POINTERS = {
    "bfloat16": "*bf16",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e4m3fnuz": "*fp8e4b8",
    "float32": "*fp32",
    "int32": "*i32",
    "uint8": "*u8",
}


def kind_of(target: str) -> str:
    return "rocm" if target.startswith("gfx") else "cuda"


def launched(prepared: Any, name: str) -> tuple[tuple, dict[str, Any]]:
    """Arguments and options with which `prepared.call()` launches the kernel that it holds under a name;
    nothing runs, and tensors may be on torch's meta device."""
    caught: dict[str, tuple[tuple, dict[str, Any]]] = {}
    for attribute, value in list(vars(prepared).items()):
        if callable(value) and not isinstance(value, torch.Tensor):
            setattr(prepared, attribute, lambda *a, _name=attribute, **o: caught.setdefault(_name, (a, o)))
    prepared.call()
    return caught[name]


def compile_launch(kernel: Any, target: str, arguments: tuple, options: dict[str, Any]) -> Any:
    """Types, constants (a size of 1 is one) and divisibility by 16 are those of the launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    constants = {
        p.name: given[p.name]
        for p in kernel.params
        if p.is_constexpr or (type(given[p.name]) is int and given[p.name] == 1)
    }

    def type_of(value: object) -> str:
        if isinstance(value, torch.Tensor):
            return POINTERS[str(value.dtype).removeprefix("torch.")]
        return {int: "i32", float: "fp32"}[type(value)]

    types = {n: "constexpr" if n in constants else type_of(given[n]) for n in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind[0] == "*" or (kind == "i32" and given[name] % 16 == 0)
    }
    source = ASTSource(kernel, types, constants, aligned)
    tuning = {n: value for n, value in options.items() if n not in types}
    return triton.compile(source, target=GPUTarget(*TARGETS[target][0]), options=tuning)


def assembly(compiled: Any) -> str:
    return compiled.asm["amdgcn" if "amdgcn" in compiled.asm else "ptx"]


def spilled(compiled: Any) -> int:
    """Bytes per thread that did not fit the registers."""
    if "amdgcn" in compiled.asm:
        return int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", compiled.asm["amdgcn"])[1])
    return _usage(compiled)[1]


def registers(compiled: Any) -> int:
    if "amdgcn" in compiled.asm:
        return int(re.search(r"\.vgpr_count:\s+(\d+)", compiled.asm["amdgcn"])[1])
    return _usage(compiled)[0]


def _usage(compiled: Any) -> tuple[int, int]:
    from triton.backends import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [Path(nvidia.__file__).parent / "bin" / "cuobjdump", "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", usage)[1]), int(re.search(r"STACK:(\d+)", usage)[1])
