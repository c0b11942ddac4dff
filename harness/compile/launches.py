"""What the suite's Triton implementations launch for given cases on a GPU that need not be here.

Their calls are made with operands on torch's meta device. Before a compilation Triton tells its own hook
which kernel it would compile, and for which types, alignments, constants and options. The hook answers that
there is nothing to do, so nothing is compiled or launched; what the hook sees is what a call launches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import kernels
from harness.catalogue.architectures import Architecture
from harness.files import JsonObject
from kernels.op import Op, Unsupported
from kernels.operands import Operands
from kernels.triton_runtime import SuiteTriton
from shapes.case import Case
from shapes.suites import suites

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

OPTIONS = ("num_warps", "num_stages", "matrix_instr_nonkdim")  # Triton's, that are part of a configuration
MARKS = {"tt.divisibility": ":16", "tt.pointer_range": ":2G"}  # by Triton's attribute (see `arguments`)


@dataclass
class KernelLaunch:
    """A kernel with all that it is compiled for."""

    op: str
    implementation: str
    kernel: str  # `module:name`
    arch: str
    data: str  # JSON for JITFunction.preload: types, constants, alignments, options
    why_older: str = ""  # why an older matrix instruction may be used; empty: it must not be used
    cases: list[str] = field(default_factory=list)  # texts of the cases whose calls launch it

    @property
    def name(self) -> str:
        return self.kernel.partition(":")[2]

    @property
    def config(self) -> str:
        """Constants and options, as `BLOCK_M=64 num_warps=4`."""
        data = json.loads(self.data)
        parameters = list(data["signature"])
        constants = zip(data["constant_keys"], data["constant_vals"], strict=True)
        values = {parameters[path[0]]: value for path, value in constants}  # path[0] counts parameters
        values |= {name: data["options"][name] for name in OPTIONS if data["options"].get(name)}
        return " ".join(f"{name}={value}" for name, value in values.items())

    @property
    def arguments(self) -> str:
        """Types of the arguments that are no constants, as Triton writes them. A star marks a pointer, `:16`
        an address or size that 16 divides, `:2G` a tensor within 2 GB."""
        data = json.loads(self.data)
        marks: dict[int, str] = {}  # by the index of the parameter, which is the first number of its path
        for path, attributes in zip(data["attrs_keys"], data["attrs_vals"], strict=True):
            marks[path[0]] = "".join(MARKS.get(attribute, "") for attribute, _ in attributes)
        parameters = enumerate(data["signature"].items())
        variables = [(index, name, kind) for index, (name, kind) in parameters if kind != "constexpr"]
        return " ".join(f"{name}={kind}{marks.get(index, '')}" for index, name, kind in variables)


def cases_of_suites(op: str) -> list[Case]:
    """The op's cases in all suites, each once."""
    cases = [case for suite in suites().values() for case in suite.cases(op)]
    return list({case.text: case for case in cases}.values())


def implementations(op: str) -> list[SuiteTriton]:
    return [i for i in kernels.implementations(op) if isinstance(i, SuiteTriton)]


def launches(op: str, architecture: Architecture, cases: Iterable[Case]) -> list[KernelLaunch]:
    """What all Triton implementations of an op launch for the cases, each launch once, with the texts of its
    cases. The architecture gives sizes that a case leaves open."""
    definition = kernels.OPS[op]
    distinct: dict[tuple[str, str], KernelLaunch] = {}
    for case in cases:
        sizes = definition.sizes({**definition.defaults(architecture.arch), **case.sizes})
        for implementation in implementations(op):
            if not implementation.fits(sizes).ok:
                continue
            operands = definition.empty_operands(sizes, "meta")
            try:
                made = launches_of(definition, implementation, architecture, operands, sizes)
            except Unsupported:
                continue
            for launch in made:
                distinct.setdefault((launch.kernel, launch.data), launch).cases.append(case.text)
    return list(distinct.values())


def narrowed(op: Op, implementation: SuiteTriton, sizes: DataclassInstance) -> Operands:
    """Operands without values, of the boundary that an implementation computes."""
    operands: Operands = op.empty_operands(sizes, "meta")
    while operands.boundary not in implementation.boundaries:
        operands = operands.narrowed()
    return operands


def launches_of(
    op: Op, implementation: SuiteTriton, on: Architecture, operands: Operands, sizes: DataclassInstance
) -> list[KernelLaunch]:
    """What one call launches, in order, each launch once. If the operands are of a wider boundary than the
    implementation's, the suite's own kernels that come before are included. Raises Unsupported."""
    with recorded_launches(on) as recorded:
        _call(op, implementation, on, operands, sizes)
    launches = []
    for kernel, data in dict.fromkeys(recorded):
        launch = KernelLaunch(op.name, implementation.name, kernel, on.arch, data)
        launch.why_older = implementation.older_instructions.get(launch.name, "")
        launches.append(launch)
    return launches


def _call(
    op: Op, implementation: SuiteTriton, on: Architecture, operands: Operands, sizes: DataclassInstance
) -> Mapping[str, torch.Tensor]:
    """Calls an implementation. Where the operands are of a wider boundary, it is called on the narrowed
    ones; then the op's step is called, which writes to the tensors that the implementation reads. Returns the
    tensors that are read on these operands, by name. Raises Unsupported."""
    if operands.boundary in implementation.boundaries:
        prepared = implementation.prepare_for(on.target, operands, op.empty_output(sizes, "meta"))
        prepared.call()
        return prepared.inputs()
    op.step(operands, _call(op, implementation, on, operands.narrowed(), sizes))()
    return operands.live_tensors()


@contextmanager
def recorded_launches(architecture: Architecture) -> Iterator[list[tuple[str, str]]]:
    """Yields the (kernel, data) of each launch within, as for this architecture; launches do nothing."""
    from triton import knobs

    calls: list[tuple[str, str]] = []

    def hook(*, fn: Any, compile: JsonObject, **_: object) -> bool:  # fn is Triton's, which has no types
        # The key only names an entry of a cache, and repeats the rest.
        data = json.loads(compile["specialization_data"]) | {"key": ""}
        calls.append((f"{fn.module}:{fn.jit_function.fn.__qualname__}", json.dumps(data)))
        return True

    with knobs.runtime.scope(), pretended(architecture):
        knobs.runtime.jit_cache_hook = hook
        yield calls


@contextmanager
def pretended(architecture: Architecture) -> Iterator[None]:
    """Within, Triton takes the architecture for the GPU that is here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # As much of a Triton driver as compiling asks for. A device is named by its architecture.
    absent = SimpleNamespace(
        get_current_target=lambda: GPUTarget(*architecture.triton),
        get_current_device=lambda: architecture.arch,
        get_current_stream=lambda device: 0,
    )
    before = driver._active
    driver.set_active(absent)
    try:
        yield
    finally:
        driver._active = before
