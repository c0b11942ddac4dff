"""`python -m harness compile`: every shipped configuration of the suite's Triton kernels, compiled for GPUs
that need not be here, and held against their limits."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

import kernels
from harness.architectures import Architecture, architectures, chosen
from harness.errors import FAILED, OK, NothingRan, UsageError
from harness.plan import choose_op
from harness.writing import write

TUNED = ("BLOCK_M", "BLOCK_H", "BLOCK_N", "BLOCK_D", "TILE", "CHUNK")  # and Triton's options
BACK_ENDS = {"cuda": "nvidia", "rocm": "amd"}
SAID_S = 10.0


def show(target: str | None, op: str | None, json_to: str | None) -> int:
    """Prints a table, or JSON; gives the exit code."""
    ops = [choose_op(op).name] if op else list(kernels.OPS)
    targets = able(chosen(target))
    rows = compiles(ops, targets)
    if not rows:
        raise NothingRan(f"no case of {', '.join(ops)} is one that a Triton kernel takes")
    import triton

    if json_to:
        text = json.dumps({"triton": triton.__version__, "compiles": rows}, indent=1) + "\n"
        write(json_to, text)
    else:
        print(_table(rows))
    bad = [row for row in rows if not row["ok"]]
    for row in bad:
        what = f"{row['target']} {row['op']} {row['kernel']} {row['config']}"
        print(f"{what}: {row['reason']}", file=sys.stderr)
    print(
        f"{len(rows)} configurations compiled by Triton {triton.__version__}, {len(bad)} must not be shipped",
        file=sys.stderr,
    )
    return FAILED if bad else OK


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
    from harness.compiling import compile_all
    from harness.launches import launches, shipped

    found = []
    for op in ops:
        cases = shipped(op)
        for target in targets:
            if not (of_op := launches(op, target, cases)):
                print(f"left out: no Triton kernel takes cases of {op} on {target.arch}", file=sys.stderr)
            found += of_op
    done = compile_all(found, _Progress())
    return [row(launch, figures) for launch, figures in zip(found, done, strict=True)]


def row(launch: Any, figures: Any) -> dict[str, Any]:
    """launch: harness.launches.Launch; figures: harness.figures.Figures."""
    from harness.shippable import excused, objections

    architecture = architectures()[launch.arch]
    reasons = objections(launch, figures, architecture)
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


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each kernel, tile and target, over the configurations that differ in sizes only."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in rows:
        groups.setdefault((one["target"], one["op"], one["kernel"], _tile(one["config"])), []).append(one)
    lines = [
        [
            *key,
            len(group),
            _span(group, "registers"),
            _span(group, "spills"),
            _span(group, "scratch_bytes"),
            _span(group, "shared_bytes", 1024),
            _span(group, "code_bytes", 1024),
            _span(group, "resident"),
            "\n".join(dict.fromkeys(name for one in group for name in one["matrix_instructions"])),
            "ok" if all(one["ok"] for one in group) else f"{sum(not one['ok'] for one in group)} bad",
        ]
        for key, group in groups.items()
    ]
    headers = ["target", "op", "kernel", "tile", "configs", "registers", "spills", "scratch B", "shared KB",
               "code KB", "resident", "matrix instructions", "verdict"]  # fmt: skip
    return tabulate(lines, headers, disable_numparse=True)


def _tile(config: str) -> str:
    words = dict(word.split("=", 1) for word in config.split())
    sizes = "x".join(words[name] for name in TUNED if name in words)
    options = [f"{words[name]} {name.removeprefix('num_')}" for name in ("num_warps", "num_stages")]
    return ", ".join([*([sizes] if sizes else []), *options])


def _span(group: Sequence[dict[str, Any]], name: str, unit: int = 1) -> str:
    low, high = (f"{end(one[name] for one in group) / unit:.3g}" for end in (min, max))
    return low if low == high else f"{low}-{high}"


class _Progress:
    """A line on stderr now and then."""

    def __init__(self) -> None:
        self.said = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() - self.said > SAID_S:
            self.said = time.monotonic()
            print(f"{done} of {of} configurations compiled", file=sys.stderr, flush=True)
