"""Findings of the audit as text, with the sentences that they are about, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from harness.report.text import WIDTH
from harness.serving.audit import SEVERITIES, Audited, explained
from harness.serving.schema import Finding

EXAMPLES = 2
SHORT = 5  # findings of one rule are all shown

Results = Sequence[tuple[Audited, list[Finding]]]


def rules_as_text() -> str:
    return tabulate([(name, textwrap.fill(why, 100)) for name, why in explained()], ["rule", "why"])


def as_text(results: Results, notes: bool) -> str:
    """notes: show what is to be known, too"""
    blocks = [_block(audited, findings, notes) for audited, findings in results]
    return "\n".join([*blocks, _counts(results, notes)])


def as_json(results: Results) -> str:
    document = {
        "audited": [
            {"name": audited.name, "title": audited.title, "runs": len(audited.runs),
             "claims": len(audited.claims),
             "findings": [{**finding.model_dump(), "quotes": _quotes(audited, finding)}
                          for finding in findings]}
            for audited, findings in results
        ],
        "counts": {severity: sum(finding.severity == severity for _, findings in results
                                 for finding in findings) for severity in SEVERITIES},
    }  # fmt: skip
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _block(audited: Audited, findings: Sequence[Finding], notes: bool) -> str:
    """The findings about one document or file, those of a rule together."""
    title = f": {audited.title}" if audited.title and audited.title != audited.name else ""
    lines = [f"{audited.name}{title}"]
    quotes = {claim.id: claim.quote for claim in audited.claims}
    for severity in SEVERITIES if notes else SEVERITIES[:2]:
        rules = list(dict.fromkeys(f.rule for f in findings if f.severity == severity))
        for rule in rules:
            same = [f for f in findings if (f.rule, f.severity) == (rule, severity)]
            of_runs = all(not set(f.subjects) & set(quotes) for f in same)
            shown = same[:EXAMPLES] if of_runs and len(same) > SHORT else same
            lines.append(f"  {severity} {rule}" + (f" ({len(same)})" if len(same) > 1 else ""))
            lines += [line for finding in shown for line in _lines(finding, quotes)]
            if len(shown) < len(same):
                lines.append(f"    and {len(same) - len(shown)} more: --json has all")
    if len(lines) == 1:
        lines.append("  nothing found")
    return "\n".join(lines) + "\n"


def _lines(finding: Finding, quotes: dict[str, str]) -> Iterator[str]:
    where = [s for s in finding.subjects if s not in finding.message and s not in quotes]
    at = f"{where[0]}: " if len(where) == 1 == len(finding.subjects) else ""
    yield textwrap.fill(at + finding.message, WIDTH, initial_indent="    ", subsequent_indent="      ")
    for quote in list(dict.fromkeys(quotes[s] for s in finding.subjects if s in quotes))[:EXAMPLES]:
        text = textwrap.shorten(quote, WIDTH - 10, placeholder=" ...")
        yield f'      "{text}"'


def _counts(results: Results, notes: bool) -> str:
    rows = [
        (audited.name,
         [len(audited.runs), len(audited.claims),
          *(sum(finding.severity == severity for finding in findings) for severity in SEVERITIES)])
        for audited, findings in results
    ]  # fmt: skip
    if len(rows) > 1:
        rows.append(("all", [sum(column) for column in zip(*(counts for _, counts in rows), strict=True)]))
    table = tabulate([[name, *counts] for name, counts in rows], ["", "runs", "claims", *SEVERITIES])
    hidden = rows[-1][1][-1] if rows else 0
    return table + (f"\nnotes are not shown: --notes, or --json ({hidden})" if hidden and not notes else "")


def _quotes(audited: Audited, finding: Finding) -> list[str]:
    return [claim.quote for claim in audited.claims if claim.id in finding.subjects]
