"""`python -m harness serving audit [DOCUMENT|FILE...]`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from tabulate import tabulate

from harness import archive
from harness.errors import FAILED, OK, USAGE, UsageError
from harness.files import write
from harness.serving.audit import SEVERITIES, Audited, audit, explained
from harness.serving.clients.files import UnreadableError
from harness.serving.clients.load import load
from harness.serving.integrity import examined
from harness.serving.published.documents import PublishedDocument
from harness.serving.published.index import published_corpus, published_documents, raw_files
from harness.serving.schema import Finding, ServingRun

WIDTH = 150
EXAMPLES = 2
SHORT = 5  # findings of one rule are all shown
NEVER = "never"


def show(names: Sequence[str], rules: bool, fail_on: str, notes: bool, json_to: str | None) -> int:
    """Prints what does not hold or is not alike. Returns the exit code."""
    if rules:
        print(tabulate([(name, textwrap.fill(why, 100)) for name, why in explained()], ["rule", "why"]))
        return OK
    published = published_documents()
    raw = raw_files()
    against = published_corpus()
    everything = [
        *map(of_document, published),
        *(Audited(name, runs=tuple(runs)) for name, runs in raw.items()),
    ]
    chosen, code = chosen_of(names, everything) if names else (everything, OK)
    results = [(one, audit(one, against)) for one in chosen]
    if json_to:
        write(json_to, json.dumps(_as_json(results), indent=1, allow_nan=False) + "\n")
    else:
        for one, findings in results:
            print(_text(one, findings, notes))
        print(_counts(results, notes))
    fatal = SEVERITIES[: SEVERITIES.index(fail_on) + 1] if fail_on != NEVER else ()
    if code == OK and any(f.severity in fatal for _, findings in results for f in findings):
        code = FAILED
    return code


def chosen_of(names: Sequence[str], everything: Sequence[Audited]) -> tuple[list[Audited], int]:
    """Documents by id, files by path: all files make one set, as many clients write one for each point of a
    sweep. A file that cannot be read costs itself only."""
    known, code = {one.name: one for one in everything}, OK
    files: dict[str, tuple[ServingRun, ...]] = {}
    for name in dict.fromkeys(names):
        if name in known:
            continue
        if not (Path(name).exists() or archive.is_file(Path(name))):
            raise UsageError(f"{name!r} is neither a file nor a document; documents: {', '.join(known)}")
        try:
            files[name] = tuple(load(name))
        except UnreadableError as error:
            click.echo(f"error: {error}", err=True)
            code = USAGE
    chosen = [known[name] for name in dict.fromkeys(names) if name in known]
    if files:
        title = next(iter(files)) if len(files) == 1 else f"{len(files)} files"
        chosen.append(Audited(title, runs=tuple(run for runs in files.values() for run in runs)))
    return chosen, code


def of_document(one: PublishedDocument) -> Audited:
    runs = tuple(run if run.findings else examined(run) for run in one.runs)
    return Audited(one.id, one.title, one.date, one.configurations, runs, one.claims)


def _text(one: Audited, findings: Sequence[Finding], notes: bool) -> str:
    lines = [f"{one.name}" + (f": {one.title}" if one.title and one.title != one.name else "")]
    quotes = {claim.id: claim.quote for claim in one.claims}
    for severity in SEVERITIES if notes else SEVERITIES[:2]:
        rules = list(dict.fromkeys(f.rule for f in findings if f.severity == severity))
        for rule in rules:
            same = [f for f in findings if (f.rule, f.severity) == (rule, severity)]
            of_runs = all(not set(f.subjects) & set(quotes) for f in same)
            shown = same[:EXAMPLES] if of_runs and len(same) > SHORT else same
            lines.append(f"  {severity} {rule}" + (f" ({len(same)})" if len(same) > 1 else ""))
            lines += [line for f in shown for line in _lines(f, quotes)]
            if len(shown) < len(same):
                lines.append(f"    and {len(same) - len(shown)} more: --json has all")
    if len(lines) == 1:
        lines.append("  nothing found")
    return "\n".join(lines) + "\n"


def _lines(finding: Finding, quotes: dict[str, str]) -> Iterable[str]:
    where = [s for s in finding.subjects if s not in finding.message and s not in quotes]
    at = f"{where[0]}: " if len(where) == 1 == len(finding.subjects) else ""
    yield textwrap.fill(at + finding.message, WIDTH, initial_indent="    ", subsequent_indent="      ")
    for quote in list(dict.fromkeys(quotes[s] for s in finding.subjects if s in quotes))[:EXAMPLES]:
        text = textwrap.shorten(quote, WIDTH - 10, placeholder=" ...")
        yield f'      "{text}"'


def _counts(results: Sequence[tuple[Audited, list[Finding]]], notes: bool) -> str:
    rows = [
        [one.name, len(one.runs), len(one.claims), *(sum(f.severity == s for f in found) for s in SEVERITIES)]
        for one, found in results
    ]
    if len(rows) > 1:
        rows.append(["all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
    table = tabulate(rows, ["", "runs", "claims", *SEVERITIES])
    hidden = sum(row[-1] for row in rows[-1:])
    return table + (f"\nnotes are not shown: --notes, or --json ({hidden})" if hidden and not notes else "")


def _as_json(results: Sequence[tuple[Audited, list[Finding]]]) -> dict[str, object]:
    return {
        "audited": [
            {"name": one.name, "title": one.title, "runs": len(one.runs), "claims": len(one.claims),
             "findings": [{**f.model_dump(), "quotes": _quotes(one, f)} for f in found]}
            for one, found in results
        ],
        "counts": {s: sum(f.severity == s for _, found in results for f in found) for s in SEVERITIES},
    }  # fmt: skip


def _quotes(one: Audited, finding: Finding) -> list[str]:
    return [claim.quote for claim in one.claims if claim.id in finding.subjects]
