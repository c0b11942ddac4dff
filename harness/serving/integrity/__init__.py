"""Integrity rules: what must hold between the numbers of one serving run, whoever measured it."""

from __future__ import annotations

from harness.serving.integrity import batch, latencies, littles_law, plausible, samples, totals
from harness.serving.schema import Finding, ServingRun

RULES = (*totals.RULES, *batch.RULES, *littles_law.RULES, *latencies.RULES, *samples.RULES, *plausible.RULES)


def examined(run: ServingRun) -> ServingRun:
    """The run, with what the rules find added to its findings."""
    findings: list[Finding] = [finding for rule in RULES for finding in rule(run)]
    return run.model_copy(update={"findings": (*run.findings, *findings)})
