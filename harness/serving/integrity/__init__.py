"""Integrity rules: what was measured at all, and what must hold between the numbers of one serving run."""

from __future__ import annotations

from harness.serving.integrity import latencies, littles_law, samples, totals
from harness.serving.schema import ServingRun

RULES = (*totals.RULES, *littles_law.RULES, *latencies.RULES, *samples.RULES, *totals.POSSIBLE)


def examined(run: ServingRun) -> ServingRun:
    """The run without latencies that were not measured, and with what the rules find in its findings."""
    run = samples.left_out(run)
    findings = [finding for rule in RULES for finding in rule(run)]
    return run.model_copy(update={"findings": (*run.findings, *findings)})
