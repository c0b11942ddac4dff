"""`python -m harness serving audit [DOCUMENT|FILE...]`: what does not hold in published or own results."""

from __future__ import annotations

import sys

import click

from harness.cli.options import json_option

NEVER = "never"


@click.command("audit")
@click.argument("names", nargs=-1, metavar="[DOCUMENT|FILE...]")
@click.option("--rules", is_flag=True, help="Only list the rules, each with why it matters.")
@click.option("--notes", is_flag=True, help="Show notes too: what is to be known, and claims that hold.")
@click.option(
    "--fail-on",
    type=click.Choice(["wrong", "suspect", NEVER]),
    default="wrong",
    show_default=True,
    help="The mildest finding that makes the exit code 1.",
)
@json_option("Write JSON there instead of text.")
def audit(names: tuple[str, ...], rules: bool, fail_on: str, notes: bool, json_to: str | None) -> None:
    """What does not hold, or is not alike, in published documents (all of them where none is named) or in
    your own results: found by rules over the data. Exit code 1 where something is `wrong` (see --fail-on), 2
    where a name or file cannot be read."""
    from harness.errors import FAILED, OK, USAGE
    from harness.files import write
    from harness.serving.audit import SEVERITIES
    from harness.serving.audit import audit as find_faults
    from harness.serving.audit.report import as_json, as_text, rules_as_text
    from harness.serving.audit.select import published_audits, select
    from harness.serving.published.index import published_corpus

    if rules:
        print(rules_as_text())
        return
    audited, unreadable = select(names, published_audits())
    for error in unreadable:
        click.echo(f"error: {error}", err=True)
    corpus = published_corpus()
    results = [(document, find_faults(document, corpus)) for document in audited]
    if json_to:
        write(json_to, as_json(results))
    else:
        print(as_text(results, notes))
    if unreadable:
        sys.exit(USAGE)
    fatal = SEVERITIES[: SEVERITIES.index(fail_on) + 1] if fail_on != NEVER else ()
    fails = any(finding.severity in fatal for _, findings in results for finding in findings)
    sys.exit(FAILED if fails else OK)
