"""Launches: what the suite's Triton implementations launch for given cases on a GPU that need not be here.

Their calls are made with operands on torch's meta device, and Triton tells its own hook before a compilation
which kernel it would compile, and for which types, alignments, constants and options. The hook answers that
there is nothing to do: nothing is compiled or launched, and what the hook sees is what a call launches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kernels
from harness.catalogue.architectures import Architecture
from harness.compile.pretend_driver import pretended
from harness.files import JsonObject
from kernels.op import Op, Unsupported
from kernels.operands import Operands
from kernels.triton_runtime import SuiteTriton
from shapes.case import Case
from shapes.suites import suites

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance


@dataclass
class KernelLaunch:
    """A kernel with all that it is compiled for.

    kernel: `module:name`
    data:   JSON for JITFunction.preload: types, constants, alignments, options
    cases:  texts of the cases whose calls launch it
    excuse: why it may do without the architecture's matrix instructions of 64 rows and more; empty if not
    """

    op: str
    implementation: str
    kernel: str
    arch: str
    data: str
    excuse: str = ""
    cases: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.kernel.partition(":")[2]

    @property
    def config(self) -> str:
        """Constants and Triton's options, for people."""
        read = json.loads(self.data)
        names = list(read["signature"])
        places = [names[at[0]] for at in read["constant_keys"]]
        options = {n: read["options"].get(n) for n in ("num_warps", "num_stages", "matrix_instr_nonkdim")}
        words = {n: value for n, value in options.items() if value}
        words = dict(zip(places, read["constant_vals"], strict=True)) | words
        return " ".join(f"{name}={value}" for name, value in words.items())

    @property
    def arguments(self) -> str:
        """Types of the arguments that are no constants, as Triton writes them; a star marks a pointer, `:16`
        an address or size that 16 divides, `:2G` a tensor within 2 GB."""
        read = json.loads(self.data)
        known = dict(zip((at[0] for at in read["attrs_keys"]), read["attrs_vals"], strict=True))
        marks = {"tt.divisibility": ":16", "tt.pointer_range": ":2G"}
        return " ".join(
            f"{name}={kind}" + "".join(marks.get(mark, "") for mark, _ in known.get(i, []))
            for i, (name, kind) in enumerate(read["signature"].items())
            if kind != "constexpr"
        )


def shipped(op: str) -> list[Case]:
    """The cases of all suites, each once."""
    cases = [case for suite in suites().values() for case in suite.cases(op)]
    return list({case.text: case for case in cases}.values())


TUNED = ("smoke", "r1-tp8", "r1-tp4", "r1-dp-ep8", "serving-1000-1000-c10800")
"""Suites whose cases configurations are chosen for: those of the others lie between them, and have no other
heads, dtypes, pages or experts."""


def tuned(op: str) -> list[Case]:
    """The cases that configurations are chosen for, each once."""
    named = suites()
    return list({case.text: case for name in TUNED for case in named[name].cases(op)}.values())


def implementations(op: str) -> list[SuiteTriton]:
    return [i for i in kernels.implementations(op) if isinstance(i, SuiteTriton)]


def launches(op: str, architecture: Architecture, cases: Iterable[Case]) -> list[KernelLaunch]:
    """What all Triton implementations of an op launch for the cases, each once, with the suite's own kernels
    that stand before them in wider boundaries. Sizes that a case leaves open are the architecture's."""
    it = kernels.OPS[op]
    seen: dict[tuple[str, str], KernelLaunch] = {}
    for case in cases:
        sizes = it.sizes({**it.defaults(architecture.arch), **case.sizes})
        for implementation in implementations(op):
            if not implementation.fits(sizes).ok:
                continue
            with recorded_launches(architecture) as calls:
                _call(it, implementation, architecture, it.empty_operands(sizes, "meta"), sizes)
            for kernel, data in dict.fromkeys(calls):
                launch = _launch(op, implementation, architecture, kernel, data)
                seen.setdefault((kernel, data), launch).cases.append(case.text)
    return list(seen.values())


def narrowed(op: Op, implementation: SuiteTriton, sizes: DataclassInstance) -> Operands:
    """Operands of the boundary that an implementation computes, without values."""
    operands: Operands = op.empty_operands(sizes, "meta")
    while operands.boundary not in implementation.boundaries:
        operands = operands.narrowed()
    return operands


def launches_of(
    op: Op,
    implementation: SuiteTriton,
    architecture: Architecture,
    operands: Operands,
    sizes: DataclassInstance,
) -> list[KernelLaunch]:
    """What one call launches on operands of the implementation's own boundary, in order; a kernel that it
    launches twice stands there twice. Raises Unsupported."""
    with recorded_launches(architecture) as calls:
        implementation.prepare_for(architecture.target, operands, op.empty_output(sizes, "meta")).call()
    return [_launch(op.name, implementation, architecture, kernel, data) for kernel, data in calls]


def _launch(op: str, implementation: SuiteTriton, on: Architecture, kernel: str, data: str) -> KernelLaunch:
    excuse = implementation.older_instructions.get(kernel.partition(":")[2], "")
    return KernelLaunch(op, implementation.name, kernel, on.arch, data, excuse)


def _call(
    op: Op, implementation: SuiteTriton, on: Architecture, operands: Operands, sizes: DataclassInstance
) -> Mapping[str, torch.Tensor] | None:
    """Calls it on operands of a boundary, after the steps that lead to its own; gives where it reads them."""
    if operands.boundary in implementation.boundaries:
        try:
            prepared = implementation.prepare_for(on.target, operands, op.empty_output(sizes, "meta"))
        except Unsupported:
            return None
        prepared.call()
        return prepared.inputs()
    inputs = _call(op, implementation, on, operands.narrowed(), sizes)
    if inputs is None:
        return None
    op.step(operands, inputs)()
    return operands.live_tensors()


@contextmanager
def recorded_launches(architecture: Architecture) -> Iterator[list[tuple[str, str]]]:
    """(kernel, data) of each launch within, as on this architecture; launches do nothing."""
    from triton import knobs

    calls: list[tuple[str, str]] = []

    def hook(*, fn: Any, compile: JsonObject, **_: object) -> bool:  # fn: Triton's, which has no types
        # The key only names an entry of a cache, and holds what the rest does.
        data = json.loads(compile["specialization_data"]) | {"key": ""}
        calls.append((f"{fn.module}:{fn.jit_function.fn.__qualname__}", json.dumps(data)))
        return True

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        with pretended(architecture):
            yield calls
    finally:
        knobs.runtime.jit_cache_hook = before
