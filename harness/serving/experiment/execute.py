"""An experiment on this machine: its engine, its client and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from harness.errors import NothingRan
from harness.machine.device import choose_device
from harness.serving.experiment.engine import engine_live
from harness.serving.experiment.kernels import LocalBench
from harness.serving.experiment.run import Conduct
from harness.serving.experiment.spec import Experiment
from harness.serving.experiment.stages import Stages
from harness.serving.live.checkpoint.directory import check_model, default_model
from harness.serving.live.engine.launch import kind_for
from harness.serving.live.engine.time_slices import require_cpu
from harness.serving.live.live_engine import disk_failure_is_one_line
from harness.serving.live.process.launching import termination_is_an_interrupt
from shapes.models import read_model


def execute(
    experiment: Experiment, folder: Path, only: Sequence[str], resume: bool, say: Callable[[str], None]
) -> None:
    """Takes the swaps named through what is not done of them. Raises HarnessError."""
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
    with termination_is_an_interrupt(), disk_failure_is_one_line(folder):
        Conduct(
            experiment,
            rank,
            folder,
            stages,
            LocalBench(settings, "refuse" if experiment.rules.disturbed else "keep", say, engine.environment),
            partial(engine_live, experiment, model, folder, say),
            platform.name,
            say,
        ).run(only)
