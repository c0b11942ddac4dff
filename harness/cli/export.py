"""`python -m harness export`: a recorded run as pytest-benchmark's JSON."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("run")
@click.option("-o", "--output", metavar="FILE|-", help="Default: benchmark.json in the run's folder.")
def export(run: str, output: str | None) -> None:
    """A recorded RUN as another tool's file: `pytest-benchmark compare` reads it."""
    from harness.results.export import export as write

    sys.exit(write(run, output))
