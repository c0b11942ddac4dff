"""Steps that an experiment replays: those that the engine was seen to make."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from harness.errors import HarnessError
from harness.serving.experiment.routing import decode_picks, prefill_picks
from harness.serving.experiment.schedule import Schedule, schedule
from harness.serving.experiment.schema import LiveRun, ObservedArm
from harness.serving.experiment.spec import Experiment, Swap
from harness.serving.live.ab.rejection import pattern_text
from harness.serving.replay.step import ReplayStep, StepPlace, places
from shapes.attention import Parallel
from shapes.models import ModelConfig

Choices = Mapping[str, str]


def pattern_of(experiment: Experiment, base: ObservedArm) -> tuple[int, ...]:
    """How requests are prefilled together: as the file says, else as in most of the base's plain runs."""
    if experiment.rules.prefill_pattern:
        return experiment.rules.prefill_pattern
    seen = Counter(run.pattern for run in base.runs if run.pattern)
    if not seen:
        raise HarnessError("the base's runs show no prefill pattern; give rules.prefill_pattern")
    return seen.most_common(1)[0][0]


def decode_alone(experiment: Experiment) -> bool:
    """Only the steady step is asked for, which is the same however its prompts were prefilled."""
    return set(experiment.predict.quantities) == {"itl"}


def require_pattern(experiment: Experiment, base: ObservedArm) -> None:
    """Raises HarnessError where every run would be rejected for its pattern."""
    if base.runs and not decode_alone(experiment) and not typical(experiment, base):
        seen = " and ".join(sorted({pattern_text(run.pattern) for run in base.runs}))
        raise HarnessError(
            f"all runs would be rejected: the base prefills {seen} requests together, and "
            f"rules.prefill_pattern is {pattern_text(experiment.rules.prefill_pattern)}"
        )


def schedule_of(experiment: Experiment, base: ObservedArm) -> Schedule:
    load, pattern = experiment.load, pattern_of(experiment, base)
    try:
        return schedule(pattern, load.prompts, load.concurrency, load.output_len)
    except ValueError as error:
        raise HarnessError(f"prefill pattern {pattern}: {error}; give rules.prefill_pattern") from None


def typical(experiment: Experiment, base: ObservedArm) -> list[LiveRun]:
    """The base's plain runs that have the pattern."""
    return [run for run in base.runs if run.pattern == pattern_of(experiment, base)]


def decode_steps(
    experiment: Experiment, rank: ModelConfig, base: ObservedArm, folder: Path
) -> list[ReplayStep]:
    """The steady step, the batch being full, at the mean context of the steady window: one for each recorded
    routing."""
    load, settings = experiment.load, experiment.replay
    lengths = [run.kv_len for run in base.runs if run.kv_len]
    context = round(statistics.fmean(lengths)) if lengths else load.input_len + load.output_len // 2
    recorded = (
        decode_picks(folder / base.routing, load.concurrency, settings.routings) if base.routing else [()]
    )
    dense = rank.first_k_dense_replace
    return [
        ReplayStep(
            rank,
            Parallel(tp=settings.tp),
            "decode",
            (context,) * load.concurrency,
            (),
            dense,
            rank.num_hidden_layers - dense,
            settings.page,
            picks=picks,
        )
        for picks in recorded
    ]


def prefill_step(
    experiment: Experiment, rank: ModelConfig, base: ObservedArm, folder: Path, requests: int
) -> ReplayStep:
    """The step that prefills so many requests; those that decode in it are left out."""
    load, dense = experiment.load, rank.first_k_dense_replace
    new = (load.input_len,) * requests
    slack = load.concurrency - requests
    picks = prefill_picks(folder / base.routing, sum(new), slack) if base.routing else ()
    return ReplayStep(
        rank,
        Parallel(tp=experiment.replay.tp),
        "prefill",
        new,
        new,
        dense,
        rank.num_hidden_layers - dense,
        experiment.replay.page,
        picks=picks,
    )


def choices(experiment: Experiment, swap: Swap, step: ReplayStep) -> tuple[Choices, Choices]:
    """The base's implementations and the swap's, in this step: what it has no place for is left out."""
    known = {f"{place.op}:{place.name}" for place in places(step)} | set(experiment.replay.base)
    new = {key: value for key, value in swap.replay.items() if key in known}
    return experiment.replay.base, {**experiment.replay.base, **new}


def changed_places(step: ReplayStep, base: Choices, chosen: Choices) -> list[str]:
    """Names of the step's calls that the swap changes, each as often as the step makes it."""

    def of(place: StepPlace, which: Choices) -> str:
        return which.get(f"{place.op}:{place.name}") or which[place.op]

    return [p.name for p in places(step) if p.op and of(p, base) != of(p, chosen)]
