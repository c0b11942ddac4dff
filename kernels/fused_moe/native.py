"""Implementations that take FP8 only in the format of the architecture's matrix instructions."""

from __future__ import annotations

from kernels.formats import native
from kernels.op import Implementation, Support, need
from kernels.platform import Platform
from shapes.case import Case


class NativeFp8(Implementation):
    """activations: rounded to FP8, of x within the call and of h."""

    activations = "fp8"

    def supports(self, case: Case, platform: Platform) -> Support:
        wanted = native(platform.arch)
        given = case.sizes.get("fp8", wanted)
        return Support.all_of(
            super().supports(case, platform),
            need(given == wanted, f"{platform.arch} takes {wanted}, not {given}"),
        )
