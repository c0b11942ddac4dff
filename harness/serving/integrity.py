"""What must hold between the numbers of one run, whoever measured it."""

from __future__ import annotations

from harness.serving.schema import Finding, ServingRun

RULES = ()


def examined(run: ServingRun) -> ServingRun:
    """The run, with what the rules find added to its findings."""
    found: list[Finding] = [one for rule in RULES for one in rule(run)]
    return run.model_copy(update={"findings": (*run.findings, *found)})
