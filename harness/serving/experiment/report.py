"""An experiment's stages as a table, and whether its replays held."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from harness import archive
from harness.serving.experiment.run import LEDGER
from harness.serving.experiment.spec import Experiment
from harness.serving.experiment.stages import Stages
from harness.serving.ledger.ledger import read, rows
from harness.serving.ledger.report import ledger_lines


def replays_held(experiment: Experiment, folder: Path, only: Sequence[str]) -> bool:
    """Whether each swap has an observation, and no replay of it missed."""
    by_name = {row.id: row for row in rows(read(folder / LEDGER))}
    for name in only:
        row = by_name.get(f"{experiment.name} {name}")
        if row is None or not row.observations:
            return False
        if any(residual.verdict == "missed" for residual in ledger_lines(row) if residual.method == "replay"):
            return False
    return True


def stages_table(experiment: Experiment, folder: Path, only: Sequence[str]) -> str:
    """What would be done, stage by stage, and what is done already."""
    stages, load = Stages(folder), experiment.load
    ledger = folder / LEDGER
    by_name = {row.id: row for row in rows(read(ledger))} if ledger.exists() else {}
    lines = [["base", "trace, routing log, plain runs", _done(stages.done("base"))]]
    for name in only:
        swap, row = experiment.swap(name), by_name.get(f"{experiment.name} {name}")
        implementations = ", ".join(f"{key}={value}" for key, value in swap.replay.items())
        replayed = bool(archive.below(folder / "stages" / name, "replay-*"))
        lines += [
            [name, f"replay and bench {implementations}", _done(replayed)],
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
