"""`python -m harness serving experiment`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.cli.serving.ledger import show as show_ledger
from harness.cli.serving.progress import progress_to_stderr
from harness.errors import FAILED, OK
from harness.files import require_writable
from harness.paths import RESULTS
from harness.serving.experiment.execute import execute
from harness.serving.experiment.report import replays_held, stages_table
from harness.serving.experiment.run import LEDGER
from harness.serving.experiment.spec import read_experiment


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
        show_ledger([str(folder / LEDGER)], json_to)
    return OK if replays_held(experiment, folder, swaps) else FAILED
