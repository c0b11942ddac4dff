"""GPU architectures: their limits, what a compute unit holds, and what is known of kernels on them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import UsageError
from harness.paths import DATA
from kernels.tuning import Target

KINDS = ("interpreted", "compiled", "emulated", "measured")
"""The kinds of evidence for a kernel of the suite, from the weakest to the strongest: it was right in
Triton's interpreter on a CPU; it was compiled within the architecture's limits; an emulator executed its
machine code; it was timed on the hardware."""

Evidence = dict[str, dict[str, int]]
"""Architecture -> kind -> the number of cases, or of configurations if it is `compiled`."""


@dataclass(frozen=True)
class Architecture:
    """What a program may take on an architecture, and what a compute unit holds for all of its programs. The
    sources of the figures are in catalogue/architectures.json."""

    arch: str
    kind: str  # cuda or rocm
    triton: tuple[str, str | int, int]  # Triton's target: back end, architecture, threads of a wave
    device: str  # the largest device of its kind in serving
    units: int  # compute units of that device
    registers_per_thread: int  # of 32 bits; on CDNA VGPRs and AGPRs together
    register_step: int  # registers of a thread are allocated in multiples of this
    registers_per_unit: int
    threads_per_program: int
    waves: int  # warps or wavefronts that a unit holds
    waves_step: int  # registers are allocated for so many waves at a time, one for each SIMD
    programs: int  # that a unit holds
    shared_per_program: int  # bytes
    shared_per_unit: int  # bytes
    shared_reserved: int  # bytes that each program takes for the system
    shared_step: int  # bytes are allocated in multiples of this
    tensor_columns: int  # of tensor memory; 0 where there is none
    instructions: Mapping[str, str]  # patterns of the matrix instructions of full rate, by dtype
    rows: int  # the least rows of a tile that those take
    older: Mapping[str, str]  # patterns of instructions that narrower tiles may declare, by dtype
    sources: Mapping[str, str]

    @property
    def threads_per_wave(self) -> int:
        return self.triton[2]

    @property
    def target(self) -> Target:
        """The facts by which implementations choose their tiles."""
        return Target(self.kind, self.arch, self.units, shared=self.shared_per_program)

    def resident(self, registers: int, shared: int, columns: int, waves: int) -> tuple[int, str]:
        """Returns how many programs a compute unit holds at once, and which resource limits that.

        registers: of one thread; shared: bytes of one program; columns: of tensor memory; waves: of one
        program
        """
        step = self.register_step
        per_wave = max(step, math.ceil(registers / step) * step) * self.threads_per_wave
        by_registers = self.registers_per_unit // per_wave // self.waves_step * self.waves_step
        per_program = math.ceil(shared / self.shared_step) * self.shared_step + self.shared_reserved
        bounds = {
            "registers": by_registers // waves,
            "shared": self.shared_per_unit // max(1, per_program),
            "waves": min(self.programs, self.waves // waves),
            "tensor memory": self.tensor_columns // columns if columns else self.programs,
        }
        limit = min(bounds, key=lambda name: bounds[name])
        return bounds[limit], limit


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Name -> architecture."""
    read = json.loads((DATA / "architectures.json").read_bytes())["architectures"]
    return {entry["arch"]: Architecture(**entry | {"triton": tuple(entry["triton"])}) for entry in read}


def select_architectures(targets: str | None) -> list[Architecture]:
    """The architectures in a list with commas; None means all. Raises UsageError for an unknown name."""
    known = architectures()
    names = [name.strip() for name in targets.split(",")] if targets is not None else list(known)
    for name in names:
        if name not in known:
            raise UsageError(f"unknown target {name!r}; targets: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


@functools.cache
def evidence() -> dict[str, Evidence]:
    """Implementation -> its evidence. `python -m tools.write_tables` makes the file from recorded runs, from
    compiled configurations, and from one run on an emulator that the file describes."""
    kernels: dict[str, Evidence] = json.loads((DATA / "evidence.json").read_bytes())["kernels"]
    return kernels
