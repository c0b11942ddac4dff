"""Load of one run: what is asked of the engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ClientLoad:
    """input_len, output_len: tokens of each request; concurrency: most in flight; prompts: requests."""

    input_len: int = 512
    output_len: int = 96
    concurrency: int = 4
    prompts: int = 4

    def facts(self) -> dict[str, Any]:
        return asdict(self)
