"""Rules by which a run does not count. Fixed before the first run, written into the journal with it, and the
same for all arms: a run is never dropped for its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.serving.live.ab.steps import RunSteps
from harness.serving.live.client.load import ClientLoad

LEAST_STEADY = 24  # inter-token times


@dataclass(frozen=True)
class RejectionRules:
    """pattern:   how requests must have been prefilled together; empty: as in the first run of all
    any_pattern: as it comes: the decode step does not depend on it, TTFT and TPOT do
    disturbed: whether a run during which other processes or the hypervisor took CPU time is rejected
    """

    pattern: tuple[int, ...] = ()
    any_pattern: bool = False
    disturbed: bool = True
    least_steady: int = LEAST_STEADY

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def reasons(
        self, load: ClientLoad, completed: int, tokens: Sequence[int], steps: RunSteps, disturbance: str
    ) -> list[str]:
        """One line for each rule that the run breaks; none: it counts."""
        reasons = []
        if completed != load.prompts:
            reasons.append(f"{completed} of {load.prompts} requests completed")
        elif short := [n for n in tokens if n != load.output_len]:
            reasons.append(f"{len(short)} requests gave other than {load.output_len} tokens ({short[0]})")
        if self.pattern and steps.pattern != self.pattern:
            was, wanted = pattern_text(steps.pattern), pattern_text(self.pattern)
            reasons.append(f"prefilled {was}, not {wanted} (arrival race)")
        if steps.steady < self.least_steady:
            reasons.append(f"{steps.steady} steady inter-token times are fewer than {self.least_steady}")
        if self.disturbed and disturbance:
            reasons.append(disturbance)
        return reasons


def pattern_text(pattern: Sequence[int]) -> str:
    """A prefill pattern, as it is printed."""
    return "+".join(map(str, pattern)) or "nobody"
