"""All configurations that runs launch, compiled for each target."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from harness.catalogue.architectures import Architecture, architectures
from harness.errors import NothingRan, UsageError

TUNED = ("BLOCK_M", "BLOCK_H", "BLOCK_N", "BLOCK_D", "TILE", "CHUNK")  # and Triton's options
BACK_ENDS = {"cuda": "nvidia", "rocm": "amd"}
SAID_S = 10.0


def able(targets: list[Architecture]) -> list[Architecture]:
    """Those that the Triton here compiles for. Raises NothingRan where there is none."""
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            raise NothingRan(f"{module} is not installed; `make set-up` installs it on x86-64 Linux")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 interprets kernels instead of compiling them; unset it")
    import triton
    from triton.backends import backends

    able = [a for a in targets if BACK_ENDS[a.kind] in backends]
    lacking = ", ".join(a.arch for a in targets if a not in able)
    if lacking:
        print(f"left out: triton {triton.__version__} here compiles nothing for {lacking}", file=sys.stderr)
    if not able:
        raise NothingRan(f"triton {triton.__version__} here has back ends for {', '.join(backends)} only")
    return able


def compiles(ops: Sequence[str], targets: Sequence[Architecture]) -> list[dict[str, Any]]:
    """A row for each kernel, configuration and target, as `--json` has it."""
    from harness.compile.compiler import compile_all
    from harness.compile.launches import launches, shipped

    found = []
    for op in ops:
        cases = shipped(op)
        for target in targets:
            if not (of_op := launches(op, target, cases)):
                print(f"left out: no Triton kernel takes cases of {op} on {target.arch}", file=sys.stderr)
            found += of_op
    done = compile_all(found, SurveyProgress())
    return [row(launch, figures) for launch, figures in zip(found, done, strict=True)]


def row(launch: Any, figures: Any) -> dict[str, Any]:
    """launch: harness.compile.launches.Launch; figures: harness.compile.resources.Figures."""
    from harness.compile.limits import excused, violations

    architecture = architectures()[launch.arch]
    reasons = violations(launch, figures, architecture)
    waves = max(1, figures.threads // architecture.threads_per_wave)
    resident, bound = architecture.resident(figures.registers, figures.shared_bytes, figures.columns, waves)
    return {
        "op": launch.op,
        "implementation": launch.implementation,
        "kernel": launch.name,
        "config": launch.config,
        "arguments": launch.arguments,
        "target": launch.arch,
        "registers": figures.registers,
        "spills": figures.spills,
        "scratch_bytes": figures.scratch_bytes,
        "shared_bytes": figures.shared_bytes,
        "tensor_columns": figures.columns,
        "threads": figures.threads,
        "code_bytes": figures.code_bytes,
        "matrix_instructions": figures.instructions,
        "resident": resident,
        "bound_by": bound,
        "cases": launch.cases,
        "ok": not reasons,
        "reason": "; ".join(reasons) or (excused(launch) if figures.scratch_bytes else ""),
    }


def tile(config: str) -> str:
    words = dict(word.split("=", 1) for word in config.split())
    sizes = "x".join(words[name] for name in TUNED if name in words)
    options = [f"{words[name]} {name.removeprefix('num_')}" for name in ("num_warps", "num_stages")]
    return ", ".join([*([sizes] if sizes else []), *options])


class SurveyProgress:
    """A line on stderr now and then."""

    def __init__(self) -> None:
        self.said = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() - self.said > SAID_S:
            self.said = time.monotonic()
            print(f"{done} of {of} configurations compiled", file=sys.stderr, flush=True)
