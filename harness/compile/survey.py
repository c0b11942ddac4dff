"""Survey of compiled kernels: all configurations that runs launch, for each target."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.catalogue.architectures import Architecture, architectures
from harness.errors import NothingRan, UsageError
from harness.files import JsonObject

if TYPE_CHECKING:
    from harness.compile.compiler import CompileEach
    from harness.compile.launches import KernelLaunch
    from harness.compile.resources import Resources

TUNED = ("BLOCK_M", "BLOCK_H", "BLOCK_N", "BLOCK_D", "TILE", "CHUNK")  # and Triton's options
BACK_ENDS = {"cuda": "nvidia", "rocm": "amd"}
INTERVAL_S = 10.0


def able(targets: list[Architecture]) -> list[Architecture]:
    """Those that the Triton here compiles for. Raises NothingRan where there is none."""
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            raise NothingRan(f"{module} is not installed; `make set-up` installs it on x86-64 Linux")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 interprets kernels instead of compiling them; unset it")
    import triton
    from triton.backends import backends

    present = [a for a in targets if BACK_ENDS[a.kind] in backends]
    lacking = ", ".join(a.arch for a in targets if a not in present)
    if lacking:
        print(f"left out: triton {triton.__version__} here compiles nothing for {lacking}", file=sys.stderr)
    if not present:
        raise NothingRan(f"triton {triton.__version__} here has back ends for {', '.join(backends)} only")
    return present


def compiles(
    ops: Sequence[str], targets: Sequence[Architecture], compile_each: CompileEach | None = None
) -> list[JsonObject]:
    """A row for each kernel, configuration and target, as `--json` has it. compile_each: as of
    `compile_all`"""
    from harness.compile.compiler import compile_all
    from harness.compile.launches import launches, shipped

    of_all: list[KernelLaunch] = []
    for op in ops:
        cases = shipped(op)
        for target in targets:
            if not (of_op := launches(op, target, cases)):
                print(f"left out: no Triton kernel takes cases of {op} on {target.arch}", file=sys.stderr)
            of_all += of_op
    done = compile_all(of_all, SurveyProgress(), compile_each)
    return [row(launch, resources) for launch, resources in zip(of_all, done, strict=True)]


def row(launch: KernelLaunch, resources: Resources) -> JsonObject:
    from harness.compile.limits import excused, violations

    architecture = architectures()[launch.arch]
    reasons = violations(launch, resources, architecture)
    waves = max(1, resources.threads // architecture.threads_per_wave)
    resident, bound = architecture.resident(
        resources.registers, resources.shared_bytes, resources.columns, waves
    )
    return {
        "op": launch.op,
        "implementation": launch.implementation,
        "kernel": launch.name,
        "config": launch.config,
        "arguments": launch.arguments,
        "target": launch.arch,
        "registers": resources.registers,
        "spills": resources.spills,
        "scratch_bytes": resources.scratch_bytes,
        "shared_bytes": resources.shared_bytes,
        "tensor_columns": resources.columns,
        "threads": resources.threads,
        "code_bytes": resources.code_bytes,
        "matrix_instructions": resources.instructions,
        "resident": resident,
        "bound_by": bound,
        "cases": launch.cases,
        "ok": not reasons,
        "reason": "; ".join(reasons) or (excused(launch) if resources.scratch_bytes else ""),
    }


def tile(config: str) -> str:
    words = dict(word.split("=", 1) for word in config.split())
    sizes = "x".join(words[name] for name in TUNED if name in words)
    options = [f"{words[name]} {name.removeprefix('num_')}" for name in ("num_warps", "num_stages")]
    return ", ".join([*([sizes] if sizes else []), *options])


class SurveyProgress:
    """A line on stderr now and then."""

    def __init__(self) -> None:
        self.shown = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() - self.shown > INTERVAL_S:
            self.shown = time.monotonic()
            print(f"{done} of {of} configurations compiled", file=sys.stderr, flush=True)
