"""The survey of compiled kernels: which ones `run` launches on each target, and which must not be shipped."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from harness.catalogue.architectures import Architecture, architectures
from harness.compile.compiler import CompileEach, Resources, compile_all
from harness.compile.launches import KernelLaunch, cases_of_suites, launches
from harness.errors import NothingRan, UsageError
from harness.files import JsonObject
from harness.paths import DATA

REFUSED = DATA / "refused.json"
TILE = ("BLOCK_M", "BLOCK_H", "BLOCK_N", "BLOCK_D", "TILE", "CHUNK")  # the constants that are sizes of a tile
BACK_ENDS = {"cuda": "nvidia", "rocm": "amd"}


def require_compiler(targets: list[Architecture]) -> list[Architecture]:
    """The targets that the Triton here can compile for. Raises NothingRan where there is none."""
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


def compiled_rows(
    ops: Sequence[str], targets: Sequence[Architecture], compile_each: CompileEach | None = None
) -> list[JsonObject]:
    """A row for each kernel, configuration and target, as in `compile --json`."""
    all_launches: list[KernelLaunch] = []
    for op in ops:
        cases = cases_of_suites(op)
        for target in targets:
            made = launches(op, target, cases)
            if not made:
                print(f"left out: no Triton kernel takes cases of {op} on {target.arch}", file=sys.stderr)
            all_launches += made
    results = compile_all(all_launches, compile_each)
    return [row(launch, resources) for launch, resources in zip(all_launches, results, strict=True)]


def row(launch: KernelLaunch, resources: Resources) -> JsonObject:
    """What `compile --json` says of a launch."""
    architecture = architectures()[launch.arch]
    reasons = violations(launch, resources, architecture)
    waves = _waves(resources, architecture)
    resident, bound = architecture.resident(
        resources.registers, resources.shared_bytes, resources.tensor_columns, waves
    )
    taken = asdict(resources)
    for name in ("products", "remarks", "error"):  # `reason` says what is wrong with them
        del taken[name]
    return {
        "op": launch.op,
        "implementation": launch.implementation,
        "kernel": launch.name,
        "config": launch.config,
        "arguments": launch.arguments,
        "target": launch.arch,
        **taken,
        "resident": resident,
        "bound_by": bound,
        "cases": launch.cases,
        "ok": not reasons,
        "reason": "; ".join(reasons),
    }


def tile(config: str) -> str:
    """The tile and options of a configuration in words: `64x128, 4 warps, 2 stages`."""
    words = dict(word.split("=", 1) for word in config.split())
    parts = ["x".join(words[name] for name in TILE if name in words)]
    parts += [f"{words[name]} {name.removeprefix('num_')}" for name in ("num_warps", "num_stages")]
    return ", ".join(filter(None, parts))


def violations(launch: KernelLaunch, resources: Resources, architecture: Architecture) -> list[str]:
    """Why a compiled configuration must not be shipped, in words; empty if it may be."""
    if resources.error:
        return [resources.error]
    limits = (
        ("registers of a thread", resources.registers, architecture.registers_per_thread),
        ("threads", resources.threads, architecture.threads_per_program),
        ("bytes of shared memory", resources.shared_bytes, architecture.shared_per_program),
        ("columns of tensor memory", resources.tensor_columns, architecture.tensor_columns),
    )
    arch = architecture.arch
    reasons = [f"takes {taken} {what}; {arch} has {limit}" for what, taken, limit in limits if taken > limit]
    waves = _waves(resources, architecture)
    resident_by_registers, _ = architecture.resident(resources.registers, shared=0, columns=0, waves=waves)
    if resident_by_registers == 0:
        what = f"{resources.threads} threads of {resources.registers} registers"
        reasons.append(f"{what} are more than a compute unit has")
    if resources.scratch_bytes:
        what = f"spills {resources.spills} registers: " if resources.spills else ""
        reasons.append(f"{what}{resources.scratch_bytes} bytes of scratch a thread")
    reasons += _products(launch, resources, architecture)
    reasons += resources.remarks
    identity = {"kernel": launch.name, "target": arch, "config": launch.config, "arguments": launch.arguments}
    for refused in _refused():
        if identity.items() <= refused.items():  # it is about this launch
            reasons.append(f"under Triton {refused['triton']}: {refused['reason']}")
    return reasons


@functools.cache
def _refused() -> list[dict[str, str]]:
    """The launches that must not be shipped because of how another supported Triton compiles them."""
    refused: list[dict[str, str]] = json.loads(REFUSED.read_bytes())["refused"]
    return refused


def _waves(resources: Resources, architecture: Architecture) -> int:
    """The warps or wavefronts of a program."""
    return max(1, resources.threads // architecture.threads_per_wave)


def _products(launch: KernelLaunch, resources: Resources, architecture: Architecture) -> Iterator[str]:
    """Why products are slow, a line each. A product needs the architecture's fast instruction for its dtype.
    If its tile has fewer rows than that instruction, an older one suffices that it declares."""

    def has(pattern: str) -> bool:
        """Whether the code has a matrix instruction of a pattern."""
        return any(re.fullmatch(pattern, instruction) for instruction in resources.matrix_instructions)

    for product in resources.products:
        tile = f"{product.m}x{product.n}x{product.k} in {product.dtype}"
        fast = architecture.instructions.get(product.dtype)
        has_rows = product.m >= architecture.rows
        if fast is None:
            yield f"multiplies {tile}, for which {architecture.arch} has no fast instruction"
        elif has(fast):
            continue
        elif has_rows or product.dtype not in architecture.older:
            yield f"multiplies {tile} without {architecture.arch}'s instruction for it"
        elif not launch.why_older:
            yield f"multiplies {tile}, fewer rows than {architecture.arch}'s instruction has, undeclared"
        elif not has(architecture.older[product.dtype]):
            yield f"multiplies {tile} without the older instruction that it declares"
    if resources.products and all(product.m >= architecture.rows for product in resources.products):
        for older in set(architecture.older.values()):
            if has(older):
                yield f"has {older} where all tiles have the rows of {architecture.arch}'s instructions"
