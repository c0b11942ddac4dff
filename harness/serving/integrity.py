"""What must hold between the numbers of one run, whoever measured it.

`wrong`: cannot hold. `suspect`: needs an explanation, e.g. other units. `note`: is to be known; where the
client trims its window, an equation over the whole run does not hold, rightly, and that is a note too.
"""

from __future__ import annotations

from harness.serving.rules import batch, flight, latencies, plausible, samples, totals
from harness.serving.schema import Finding, ServingRun

RULES = (*totals.RULES, *batch.RULES, *flight.RULES, *latencies.RULES, *samples.RULES, *plausible.RULES)


def examined(run: ServingRun) -> ServingRun:
    """The run, with what the rules find added to its findings."""
    found: list[Finding] = [one for rule in RULES for one in rule(run)]
    return run.model_copy(update={"findings": (*run.findings, *found)})
