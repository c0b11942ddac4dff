"""GPU architectures that kernels are compiled for, here or not: their limits, and what a unit holds."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import UsageError
from harness.paths import DATA
from kernels.tuning import Target

LIMITS = DATA / "architectures.json"


@dataclass(frozen=True)
class Architecture:
    """See catalogue/architectures.json for what each figure means and where it comes from."""

    arch: str
    kind: str
    triton: tuple[str, str | int, int]
    device: str
    units: int
    registers_per_thread: int
    register_step: int
    registers_per_unit: int
    threads_per_program: int
    waves: int
    waves_step: int
    programs: int
    shared_per_program: int
    shared_per_unit: int
    shared_reserved: int
    shared_step: int
    tensor_columns: int
    instructions: Mapping[str, str]
    rows: int
    older: Mapping[str, str]
    older_rate: Mapping[str, float]
    cache_tbps: float
    latency_ns: float
    launch_us: float
    flops_per_clock: Mapping[str, float]
    shared_per_clock: float
    product_rows: int
    sources: Mapping[str, str]

    @property
    def threads_per_wave(self) -> int:
        return self.triton[2]

    @property
    def target(self) -> Target:
        """What implementations choose their tiles by."""
        return Target(self.kind, self.arch, self.units, shared=self.shared_per_program)

    def resident(self, registers: int, shared: int, columns: int, waves: int) -> tuple[int, str]:
        """Programs that a compute unit holds at once, and what keeps it from more.

        registers: of a thread; shared: bytes of a program; columns of tensor memory; waves: of a program
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
    """By name."""
    read = json.loads(LIMITS.read_text())["architectures"]
    return {entry["arch"]: Architecture(**entry | {"triton": tuple(entry["triton"])}) for entry in read}


def select_architectures(targets: str | None) -> list[Architecture]:
    """Those that a list with commas names, all by default. Raises UsageError for one that is unknown."""
    known = architectures()
    names = [name.strip() for name in targets.split(",")] if targets is not None else list(known)
    for name in names:
        if name not in known:
            raise UsageError(f"unknown target {name!r}; targets: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]
