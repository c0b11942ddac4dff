"""`python -m harness serving experiment`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from harness import archive
from harness.cli.serving.ledger import print_ledgers
from harness.errors import FAILED, OK, HarnessError, NothingRan
from harness.files import require_writable
from harness.paths import RESULTS
from harness.serving.experiment.engine import engine_live
from harness.serving.experiment.kernels import LocalBench
from harness.serving.experiment.run import LEDGER, Conduct
from harness.serving.experiment.spec import Experiment, read_experiment
from harness.serving.experiment.stages import Stages
from harness.serving.ledger.ledger import read, rows
from harness.serving.ledger.residuals import residuals
from shapes.models import read_model

EXPERIMENTS = RESULTS / "experiments"


def show(
    file: str,
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
    require_writable(json_to, None)
    experiment = read_experiment(file)
    if pairs is not None:
        experiment = experiment.model_copy(
            update={"load": experiment.load.model_copy(update={"pairs": pairs})}
        )
    chosen = [experiment.swap(name) for name in only] or list(experiment.swaps)
    folder = (Path(out) if out else EXPERIMENTS / experiment.name).absolute()
    if dry_run:
        print(plan(experiment, folder, [swap.name for swap in chosen]))
        return OK
    conduct(experiment, folder, resume, [swap.name for swap in chosen], quiet)
    if not quiet or json_to:
        print_ledgers([str(folder / LEDGER)], json_to)
    return outcome(experiment, folder, [swap.name for swap in chosen])


def conduct(experiment: Experiment, folder: Path, resume: bool, only: Sequence[str], quiet: bool) -> None:
    """With this machine's engine, client and kernels."""
    from harness.machine.device import choose_device
    from harness.serving.live.checkpoint.directory import check_model, default_model
    from harness.serving.live.engine.launch import kind_for
    from harness.serving.live.engine.time_slices import require_cpu
    from harness.serving.live.process.launching import termination_is_an_interrupt

    started = time.monotonic()

    def say(line: str) -> None:
        if not quiet:
            print(f"{time.monotonic() - started:6.0f} s  {line}", file=sys.stderr, flush=True)

    engine, settings = experiment.engine, experiment.replay
    platform = choose_device(settings.device or None)
    if experiment.load.slice_s:
        require_cpu(platform)
    kind_for(engine.kind)
    model = default_model(say=say) if engine.model == "default" else Path(engine.model).absolute()
    check_model(model)
    try:
        rank = read_model(model)
    except ValueError as error:
        raise NothingRan(f"{model} cannot be replayed: {error}") from None
    stages = Stages.begin(folder, experiment, resume)
    with termination_is_an_interrupt(), _a_disk_that_fails_is_one_line(folder):
        Conduct(
            experiment,
            rank,
            folder,
            stages,
            LocalBench(settings, not experiment.rules.disturbed, say, engine.environment),
            partial(engine_live, experiment, model, folder, say),
            platform.name,
            say,
        ).run(only)


@contextlib.contextmanager
def _a_disk_that_fails_is_one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HarnessError(
            f"cannot write to {error.filename or folder}: {error.strerror}; what is finished stays in "
            f"{folder}, --resume goes on"
        ) from None


def outcome(experiment: Experiment, folder: Path, only: Sequence[str]) -> int:
    found = {row.id: row for row in rows(read(folder / LEDGER))}
    mine = [found.get(f"{experiment.name} {name}") for name in only]
    if any(row is None or not row.observations for row in mine):
        return FAILED
    judged = [one for row in mine if row for one in residuals(row) if one.method == "replay"]
    return FAILED if any(one.verdict == "missed" for one in judged) else OK


def plan(experiment: Experiment, folder: Path, only: Sequence[str]) -> str:
    """What would be done, stage by stage, and what is done already."""
    stages, load = Stages(folder), experiment.load
    ledger = folder / LEDGER
    known = {row.id: row for row in rows(read(ledger))} if ledger.exists() else {}
    lines = [["base", "trace, routing log, plain runs", _done(stages.done("base"))]]
    for name in only:
        swap, row = experiment.swap(name), known.get(f"{experiment.name} {name}")
        chosen = ", ".join(f"{key}={value}" for key, value in swap.replay.items())
        replayed = bool(archive.below(folder / "stages" / name, "replay-*"))
        lines += [
            [name, f"replay and bench {chosen}", _done(replayed)],
            ["", "predict: " + ", ".join(experiment.predict.methods), _done(bool(row and row.predictions))],
            ["", f"{load.pairs} mirrored pairs against {', '.join(swap.swap) or 'its arm'}",
             _done(stages.done(f"{name}/pairs"))],
        ]  # fmt: skip
    head = (
        f"{experiment.name}: {load.input_len} in, {load.output_len} out, {load.prompts} prompts, concurrency "
        f"{load.concurrency}, in {folder}"
    )
    return head + "\n" + tabulate(lines, ["", "stage", ""], disable_numparse=True)


def _done(done: bool) -> str:
    return "done" if done else "to do"


@click.command("experiment")
@click.argument("file", metavar="FILE")
@click.option("--out", metavar="DIR", help="Its folder (default: results/experiments/ and its name).")
@click.option("--resume", is_flag=True, help="Go on with what is not done there.")
@click.option("--only", multiple=True, metavar="SWAP", help="Of its swaps only this; may be repeated.")
@click.option("--pairs", type=click.IntRange(2), help="Instead of as many as the file says.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and what is done; run nothing.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the ledger's rows there.")
@click.option("--quiet", is_flag=True, help="No table and no progress.")
def experiment_command(**options: Any) -> None:
    """What swaps of single kernels change in a live serving run, predicted first: trace, routing log, kernel
    benchmark and replay, the prediction into the ledger, then pairs of runs, then what they show. FILE is
    TOML, or the name of one that comes with the harness (cpu-decode, cpu-default, cpu-long, cpu-short). Exit
    code 1 where a replay missed or a swap has no observation."""
    sys.exit(show(**options))
