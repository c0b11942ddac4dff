"""Conduct of an experiment: from its first look at the engine to the last line of its ledger, resumable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.errors import HarnessError
from harness.serving.experiment.engine import Live
from harness.serving.experiment.explain import explanation, missed
from harness.serving.experiment.kernels import KernelBench
from harness.serving.experiment.observations import observations
from harness.serving.experiment.predictions import Changes, change, prediction, require_earlier
from harness.serving.experiment.schedule import DECODE
from harness.serving.experiment.schema import ObservedArm, Paired, Replays, Served
from harness.serving.experiment.spec import Experiment, Swap
from harness.serving.experiment.stages import Stages
from harness.serving.experiment.steps import (
    changed_places,
    choices,
    decode_alone,
    decode_steps,
    pattern_of,
    prefill_step,
    require_pattern,
    schedule_of,
    typical,
)
from harness.serving.ledger.ledger import (
    ChangeEntry,
    ExplanationEntry,
    LedgerRow,
    ObservationEntry,
    PredictionEntry,
    Setting,
    append,
    read,
    rows,
)
from harness.serving.ledger.prediction import KernelChange
from harness.serving.ledger.report import ledger_lines
from harness.serving.replay.schema import Timed
from harness.serving.replay.step import ReplayStep
from harness.serving.schema import OfferedLoad
from shapes.models import ModelConfig

LEDGER = "ledger.jsonl"


class GivenUp(HarnessError):
    """Pairs that are missing: a swap is observed with as many as its file says, or not yet."""


Say = Callable[[str], None]


@dataclass
class Conduct:
    """Takes an experiment through its stages.

    live: opens servers, when first asked; they rest while kernels are benched
    """

    experiment: Experiment
    rank: ModelConfig
    folder: Path
    stages: Stages
    bench: KernelBench
    live: Callable[[], AbstractContextManager[Live]]
    hardware: str = ""
    say: Say = lambda line: None

    def run(self, only: Sequence[str] = ()) -> None:
        """All that is not done yet, of the swaps named or of all. Raises HarnessError. A swap's runs follow
        its prediction at once: a machine's speed drifts, and both should have met the same."""
        swaps = [self.experiment.swap(name) for name in only] or list(self.experiment.swaps)
        with LiveWhenAsked(self.live) as live:
            base = self.look(live)
            for swap in swaps:
                live.rest()
                self.predict(swap, base)
                self.observe(swap, base, live)

    def look(self, live: Live) -> ObservedArm:
        """The base: trace, routing log, lengths, prefill pattern."""
        base = self.stages.once("base", ObservedArm, live.look)
        if missing := [name for name in self.experiment.engine.kernels if name not in base.kernels]:
            raise HarnessError(
                f"the engine's trace has no kernel {missing[0]}: replay.base stands for other kernels than "
                f"this engine runs here ({base.trace})"
            )
        require_pattern(self.experiment, base)
        return base

    def predict(self, swap: Swap, base: ObservedArm) -> None:
        """Benches and replays the swap, and writes down what follows, before any of its runs."""
        row = self._row(swap)
        if row is None:
            append(self.folder / LEDGER, self._opened_row(swap, base))
        written = {(p.prediction.method, p.prediction.quantity) for p in row.predictions} if row else set()
        if row and row.observations:
            return
        by_method = self.changes(swap, base)
        for method in self.experiment.predict.methods:
            for quantity in self.experiment.predict.quantities:
                if (method, quantity) in written:
                    continue
                predicted = prediction(
                    method,
                    quantity,
                    swap,
                    by_method[method],
                    weights=schedule_of(self.experiment, base),
                    before=typical(self.experiment, base),
                )
                if predicted is None:
                    self.say(f"{swap.name}: no prediction of {quantity} by {method}")
                    continue
                append(self.folder / LEDGER, PredictionEntry(row=self.name(swap), prediction=predicted))
                if method == "replay":
                    self.say(f"{swap.name}: {quantity} predicted to change by {predicted.change:+.4g} ms")

    def changes(self, swap: Swap, base: ObservedArm) -> dict[str, Changes]:
        """Of each kind of step, by method."""
        by_method: dict[str, dict[int, Timed | None]] = {
            method: {} for method in self.experiment.predict.methods
        }
        for kind, steps in self.steps(base).items():
            replays = self.replays(swap, kind, steps)
            served = self.served(swap, kind, steps[0]) if replays else None
            for method, by_kind in by_method.items():
                by_kind[kind] = change(method, replays, served, swap.name)
        return dict(by_method)

    def steps(self, base: ObservedArm) -> dict[int, list[ReplayStep]]:
        """Kind (requests that it prefills, or DECODE) -> the steps of it that are replayed."""
        experiment, rank, folder = self.experiment, self.rank, self.folder
        steps = {DECODE: decode_steps(experiment, rank, base, folder)}
        if not decode_alone(experiment):
            for size in sorted(set(pattern_of(experiment, base))):
                steps[size] = [prefill_step(experiment, rank, base, folder, size)]
        return steps

    def replays(self, swap: Swap, kind: int, steps: Sequence[ReplayStep]) -> Replays | None:
        """None where the step makes none of the swapped calls."""
        base, chosen = choices(self.experiment, swap, steps[0])
        if not changed_places(steps[0], base, chosen):
            return None
        replays = []
        for number, step in enumerate(steps):
            name = f"{swap.name}/replay-{_kind(kind)}-{number}"

            def make(step: ReplayStep = step, name: str = name) -> Replays:
                self.say(f"replaying {name}")
                replay = self.bench.replay(step, swap.name, base, chosen)
                if replay.arms[swap.name].failed:
                    raise HarnessError(
                        f"{name}: the swap could not be replayed: {replay.arms[swap.name].failed}"
                    )
                if not replay.samples:
                    raise HarnessError(
                        f"{name}: no round counted, {replay.disturbed} were disturbed: quiet the machine, or "
                        "set rules.disturbed = false"
                    )
                return Replays(replays=(replay,))

            replays.append(self.stages.once(name, Replays, make).replays[0])
        return Replays(replays=tuple(replays))

    def served(self, swap: Swap, kind: int, step: ReplayStep) -> Served | None:
        wanted = self.experiment.predict
        if "serving-mode" not in wanted.methods or step.phase not in wanted.serving_phases:
            return None
        base, chosen = choices(self.experiment, swap, step)
        name = f"{swap.name}/serving-{_kind(kind)}"
        at = self.folder / "kernels" / name
        make = partial(self.bench.serving, step, base, chosen, wanted.serving_budget_s, at)
        served = self.stages.once(name, Served, make)
        for reason in served.missing:
            self.say(f"{name}: {reason}")
        return served

    def observe(self, swap: Swap, base: ObservedArm, live: Live) -> None:
        """The pairs of runs, after their prediction; what they show, and of a miss what the trace shows."""
        row = self._row(swap)
        assert row is not None
        pattern = pattern_of(self.experiment, base)
        if not row.observations:

            def make() -> Paired:
                paired = live.pairs(swap, pattern, ())
                if paired.given_up:
                    raise GivenUp(f"{swap.name}: {'; '.join(paired.given_up)}; --resume tries again")
                return paired

            try:
                paired = self.stages.once(f"{swap.name}/pairs", Paired, make)
            except GivenUp as error:
                self.say(str(error))
                return
            require_earlier([line.at for line in row.predictions], paired.begun)
        else:
            paired = self.stages.once(f"{swap.name}/pairs", Paired, lambda: _gone(swap))
        known = {line.observation.quantity for line in row.observations}
        for observation in observations(self.experiment, paired):
            if observation.quantity not in known:
                append(self.folder / LEDGER, ObservationEntry(row=row.id, observation=observation))
        self.explain(swap, base, paired, live)

    def explain(self, swap: Swap, base: ObservedArm, paired: Paired, live: Live) -> None:
        row = self._row(swap)
        assert row is not None
        misses = missed(self.experiment, ledger_lines(row))
        if not misses or row.explanations:
            return
        # The base again: the machine of its first trace, hours ago, was another.
        beside = f"{swap.name}-base"
        before = self.stages.once(f"{swap.name}/seen-base", ObservedArm, lambda: live.trace(None, beside))
        seen = self.stages.once(f"{swap.name}/seen", ObservedArm, lambda: live.trace(swap, swap.name))
        text = explanation(
            swap,
            misses,
            replays={kind: self.replays(swap, kind, steps) for kind, steps in self.steps(base).items()},
            changes=self.changes(swap, base)["replay"],
            paired=paired,
            pattern=pattern_of(self.experiment, base),
            base=before,
            seen=seen,
        )
        evidence = tuple(filter(None, (before.trace, seen.trace)))
        append(self.folder / LEDGER, ExplanationEntry(row=row.id, text=text, evidence=evidence))

    def name(self, swap: Swap) -> str:
        return f"{self.experiment.name} {swap.name}"

    def _row(self, swap: Swap) -> LedgerRow | None:
        path = self.folder / LEDGER
        known = rows(read(path)) if path.exists() else []
        return next((row for row in known if row.id == self.name(swap)), None)

    def _opened_row(self, swap: Swap, base: ObservedArm) -> ChangeEntry:
        engine, load = self.experiment.engine, self.experiment.load
        part = ", ".join(f"{key}={value}" for key, value in swap.replay.items())
        workload = OfferedLoad(
            dataset="random",
            input_len=load.input_len,
            output_len=load.output_len,
            concurrency=load.concurrency,
            num_prompts=load.prompts,
            request_rate=0.0,
        )
        setting = Setting(
            hardware=self.hardware,
            engine=engine.kind,
            version=base.version,
            model=engine.model if engine.model != "default" else self.rank.name,
            workload=workload,
            client=engine.client,
            note=self.experiment.about,
        )
        source = " ".join((*swap.swap, *swap.flags, *(f"{k}={v}" for k, v in swap.environment.items())))
        change = KernelChange(op=swap.op, part=part, source=source)
        return ChangeEntry(row=self.name(swap), changes=(change,), setting=setting)


class LiveWhenAsked(contextlib.ExitStack):
    """Opens live runs at the first call, closes them at the end: a finished experiment starts no server."""

    def __init__(self, opens: Callable[[], AbstractContextManager[Live]]) -> None:
        super().__init__()
        self.opens = opens
        self.live: Live | None = None

    def _opened(self) -> Live:
        if self.live is None:
            self.live = self.enter_context(self.opens())
        return self.live

    def look(self) -> ObservedArm:
        return self._opened().look()

    def trace(self, swap: Swap | None, name: str) -> ObservedArm:
        return self._opened().trace(swap, name)

    def rest(self) -> None:
        if self.live is not None:
            self.live.rest()

    def pairs(self, swap: Swap, pattern: tuple[int, ...], predicted: tuple[str, ...]) -> Paired:
        return self._opened().pairs(swap, pattern, predicted)


def _kind(kind: int) -> str:
    return "decode" if kind == DECODE else f"prefill-{kind}"


def _gone(swap: Swap) -> Paired:
    raise HarnessError(f"stages/{swap.name}/pairs.json is gone, though the ledger has its observation")
