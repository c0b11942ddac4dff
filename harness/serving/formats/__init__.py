"""The files of serving clients, one module for each client's.

A module has NAME, `recognises(document) -> bool` (by keys that only this client writes, never by the file's
name) and `runs(document) -> list[ServingRun]`.
"""

from __future__ import annotations

from types import ModuleType

from harness.serving.formats import dstack, sglang_serving

FORMATS: tuple[ModuleType, ...] = (sglang_serving, dstack)
