"""What is known of each of the suite's own kernels on each architecture, short of a run on the user's own.

The data is `catalogue/evidence.json`, which `python -m tools.write_tables` makes of recorded runs, of what
was compiled offline, and of one run on an emulator that is described there.
"""

from __future__ import annotations

import functools
import json

from harness.paths import DATA

KINDS = ("interpreted", "compiled", "emulated", "measured")
"""From the least to the most: right in Triton's interpreter on a CPU; compiled within the architecture's
limits; its machine code executed on an instruction-level emulator; timed on the hardware itself."""

Evidence = dict[str, dict[str, int]]
"""Architecture -> kind -> how many cases (interpreted, emulated, measured) or configurations (compiled)."""


@functools.cache
def evidence() -> dict[str, Evidence]:
    """By implementation."""
    kernels: dict[str, Evidence] = json.loads((DATA / "evidence.json").read_text())["kernels"]
    return kernels
