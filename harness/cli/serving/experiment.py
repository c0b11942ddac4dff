"""`python -m harness serving experiment`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from harness.cli.options import json_option
from harness.cli.serving.progress import progress_to_stderr
from harness.errors import FAILED, OK
from harness.files import require_writable
from harness.paths import RESULTS


def show(
    file: str,
    *,
    out: str | None,
    resume: bool,
    only: Sequence[str],
    pairs: int | None,
    dry_run: bool,
    json_to: str | None,
    quiet: bool,
) -> int:
    """Takes the experiment through what is not done of it; prints its ledger. 1 where a replay missed or a
    swap has no observation."""
    from harness.cli.serving.ledger import print_ledgers
    from harness.serving.experiment.execute import execute
    from harness.serving.experiment.report import replays_held, stages_table
    from harness.serving.experiment.run import LEDGER
    from harness.serving.experiment.spec import read_experiment

    require_writable(json_to, None)
    experiment = read_experiment(file)
    if pairs is not None:
        experiment = experiment.with_pairs(pairs)
    swaps = [experiment.swap(name).name for name in only] or [swap.name for swap in experiment.swaps]
    folder = (Path(out) if out else RESULTS / "experiments" / experiment.name).absolute()
    if dry_run:
        print(stages_table(experiment, folder, swaps))
        return OK
    execute(experiment, folder, swaps, resume, progress_to_stderr(quiet))
    if not quiet or json_to:
        print_ledgers([str(folder / LEDGER)], json_to)
    return OK if replays_held(experiment, folder, swaps) else FAILED


@click.command("experiment")
@click.argument("file", metavar="FILE")
@click.option("--out", metavar="DIR", help="Its folder (default: results/experiments/ and its name).")
@click.option("--resume", is_flag=True, help="Go on with what is not done there.")
@click.option("--only", multiple=True, metavar="SWAP", help="Of its swaps only this; may be repeated.")
@click.option("--pairs", type=click.IntRange(2), help="Instead of as many as the file says.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and what is done; run nothing.")
@json_option("Write the ledger's rows there.")
@click.option("--quiet", is_flag=True, help="No table and no progress.")
def experiment_command(**options: Any) -> None:
    """What swaps of single kernels change in a live serving run, predicted first: trace, routing log, kernel
    benchmark and replay, the prediction into the ledger, then pairs of runs, then what they show. FILE is
    TOML, the experiment.json of a folder, which makes that again, or the name of one that comes with the
    harness (cpu-decode, cpu-default, cpu-long, cpu-short). Exit code 1 where a replay missed or a swap has no
    observation."""
    sys.exit(show(**options))
