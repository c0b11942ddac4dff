"""GPU architectures: their limits, what a compute unit holds, and what is known of kernels on them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.catalogue.devices import known_devices, known_type
from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import DATA
from kernels.tuning import Target
from shapes.names import unknown

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
    triton: tuple[str, str | int, int]  # Triton's target: back end, architecture, threads of a warp or wave
    device: str  # the largest device of its kind in serving
    units: int  # compute units (SMs or CUs) of that device
    registers_per_thread: int  # the most, of 32 bits; on CDNA VGPRs and AGPRs together
    register_step: int  # registers of a thread are allocated in multiples of this
    registers_per_unit: int
    threads_per_program: int  # the most
    waves: int  # the most warps or wavefronts that a unit holds
    waves_step: int  # the SIMDs of a unit, of which each has an equal part of the registers
    programs: int  # the most programs that a unit holds
    shared_per_program: int  # the most bytes of shared memory
    shared_per_unit: int  # bytes
    shared_reserved: int  # bytes of shared memory that the system takes for each program
    shared_step: int  # shared memory is allocated in multiples of this many bytes
    tensor_columns: int  # of a unit's tensor memory; 0 where there is none
    instructions: Mapping[str, str]  # by dtype a pattern of the matrix instructions of full rate
    rows: int  # a tile needs at least so many rows for these instructions
    older: Mapping[str, str]  # by dtype a pattern of the instructions that tiles with fewer rows may use
    sources: Mapping[str, str]  # by attribute the source of its figure

    @property
    def threads_per_wave(self) -> int:
        return self.triton[2]

    @property
    def target(self) -> Target:
        """The facts of the device that implementations choose their tiles by."""
        return Target(self.kind, self.arch, self.units, shared=self.shared_per_program)

    def resident(self, registers: int, shared: int, columns: int, waves: int) -> tuple[int, str]:
        """Returns how many programs a compute unit holds at once, and which resource limits that. A program
        takes `registers` a thread, `shared` bytes, `columns` of tensor memory, and `waves`."""
        step = self.register_step
        registers_per_wave = max(step, math.ceil(registers / step) * step) * self.threads_per_wave
        waves_per_simd = self.registers_per_unit // registers_per_wave // self.waves_step
        shared_of_program = math.ceil(shared / self.shared_step) * self.shared_step + self.shared_reserved
        bounds = {
            "registers": waves_per_simd * self.waves_step // waves,
            "shared": self.shared_per_unit // max(1, shared_of_program),
            "waves": min(self.programs, self.waves // waves),
            "tensor memory": self.tensor_columns // columns if columns else self.programs,
        }
        limit = min(bounds, key=lambda name: bounds[name])
        return bounds[limit], limit


@functools.cache
def architectures() -> dict[str, Architecture]:
    """The architectures whose limits are known, by name."""
    entries = json.loads((DATA / "architectures.json").read_bytes())["architectures"]
    return {entry["arch"]: Architecture(**entry | {"triton": tuple(entry["triton"])}) for entry in entries}


def select_architectures(targets: str | None) -> list[Architecture]:
    """The architectures of targets that are separated by commas, each as `named_architecture` takes it; None
    means all. Raises UsageError for a word that names none, and where limits are unknown."""
    known = architectures()
    names = [named_architecture(word.strip()) for word in targets.split(",")] if targets else list(known)
    for name in names:
        if name not in known:
            raise UsageError(f"nothing is known of the limits of {name}; targets: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


ARCHS = (
    *("gfx942", "gfx950", "gfx90a", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    *("x86-amx", "x86-avx512", "x86-avx2", "x86", "aarch64"),
)
"""The architectures that users may ask about."""


def named_sheet(word: str) -> JsonObject | None:
    """The data sheet of the GPU that a user names in any capitals; None for another word. An architecture
    stands for its `Architecture.device` or, where its limits are unknown, for the first GPU that has it."""
    architecture = architectures().get(word.lower())
    name = known_type(architecture.device if architecture else word)
    of_name = [sheet for sheet in known_devices() if sheet["name"] == name]
    of_arch = [sheet for sheet in known_devices() if sheet["arch"] == word.lower()]
    return next(iter(of_name or of_arch), None)


def named_architecture(word: str) -> str:
    """The architecture of this name, or of the GPU of this name. Raises UsageError."""
    if word.lower() in ARCHS:
        return word.lower()
    if sheet := named_sheet(word):
        return str(sheet["arch"])
    known = [*ARCHS, *(entry["name"] for entry in known_devices())]
    raise UsageError(unknown("architecture", word, known))


@functools.cache
def evidence() -> dict[str, Evidence]:
    """Implementation -> its evidence. `python -m tools.write_tables` writes the file: from recorded runs,
    from compiled configurations, and from one run on an emulator, which the file describes."""
    kernels: dict[str, Evidence] = json.loads((DATA / "evidence.json").read_bytes())["kernels"]
    return kernels
