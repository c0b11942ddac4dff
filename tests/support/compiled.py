"""Kernels compiled for GPUs that need not be here, as `python -m harness compile` does it, uncached."""

from __future__ import annotations

import pytest

from harness.catalogue.architectures import architectures
from harness.compile.compiler import compile_launch
from harness.compile.launches import launches
from harness.compile.limits import violations
from harness.compile.resources import Resources
from shapes.case import Case, parse

TARGETS = ["gfx942", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("gfx950", "sm_90", "sm_100"))]


def resident(arch: str, figures: Resources) -> int:
    """Programs that a compute unit holds at once."""
    at = architectures()[arch]
    waves = figures.threads // at.threads_per_wave
    return at.resident(figures.registers, figures.shared_bytes, figures.columns, waves)[0]


def compiled(op: str, arch: str, text: str, *names: str) -> dict[str, Resources]:
    """By kernel, those named (default: all) that calls of a case launch; none that may not be shipped."""
    architecture, found = architectures()[arch], {}
    for launch in launches(op, architecture, [Case(op, parse(text)[0])]):
        if not names or launch.name in names:
            found[launch.name] = compile_launch(launch.kernel, arch, launch.data)
            assert not violations(launch, found[launch.name], architecture), launch.name
    return found
