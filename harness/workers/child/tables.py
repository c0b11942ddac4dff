"""What an engine reads of its tables. It is asked in a process of its own, which imports the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import kernels
from kernels.engine_tuning import EngineTuned


class Tables:
    """Requests: table."""

    def table(self, op: str, impl: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The EngineTable of a row, as plain values."""
        (row,) = (each for each in kernels.implementations(op) if each.name == impl)
        assert isinstance(row, EngineTuned)
        return asdict(row.engine_table(kernels.OPS[op].sizes(sizes)))
