"""Facts about a machine, as `doctor --json` has them."""

from __future__ import annotations

from typing import TypedDict

from harness.files import JsonObject

Facts = TypedDict(
    "Facts",
    {
        "machine": JsonObject,
        "devices": dict[str, str],
        "libraries": dict[str, str],
        "ceilings": JsonObject,
        "datasheet": list[JsonObject],
        "instruments": JsonObject,
        "conditions": dict[str, str],
        "runs here": dict[str, str],
        "what would improve it": list[str],
    },
)
"""As `--json` has them, plain values in SI units. machine: without what is not known; devices: what each is;
libraries: versions; ceilings, instruments: `problem` alone where they could not be measured; runs here:
`timed` or `checked only`, by op and implementation."""
