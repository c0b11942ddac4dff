"""The audit of a set of runs or a published document: what does not hold, or is not alike, by rules on data.

A rule takes what is audited and the corpus of all rows and claims, and gives Findings. Its docstring says why
it matters. Texts are made from numbers, never written for one document.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from harness.serving.audit import claims, rankings, recompute, runs, setups, sweeps, tables
from harness.serving.audit.corpus import Audited, Corpus, corpus
from harness.serving.schema import Finding

RULES = (
    *claims.RULES,
    *recompute.RULES,
    *tables.RULES,
    *rankings.RULES,
    *sweeps.RULES,
    *runs.RULES,
    *setups.RULES,
)
SEVERITIES = ("wrong", "suspect", "note")

__all__ = ["RULES", "SEVERITIES", "Audited", "Corpus", "audit", "corpus", "explained"]


def audit(audited: Audited, against: Corpus) -> list[Finding]:
    """What the rules find, with what the integrity tests found in each run; the gravest first. A rule here of
    the same name as an integrity test stands for it."""
    findings = [finding for rule in RULES for finding in rule(audited, against)]
    stated = {(finding.rule, subject) for finding in findings for subject in finding.subjects}
    findings += [
        _at(finding, run.id)
        for run in audited.runs
        for finding in run.findings
        if (finding.rule, run.id) not in stated
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _at(finding: Finding, run: str) -> Finding:
    return finding if finding.subjects else finding.model_copy(update={"subjects": (run,)})


def explained() -> Iterable[tuple[str, str]]:
    """Each rule's name and why it matters."""
    for rule in RULES:
        yield rule.__name__, inspect.getdoc(rule) or ""
