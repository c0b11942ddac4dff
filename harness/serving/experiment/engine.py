"""The serving engine of an experiment: its observations, and its pairs of runs, by harness/serving/live."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, Protocol

from harness.errors import NothingRan
from harness.serving.experiment.schema import LiveRun, ObservedArm, Paired
from harness.serving.experiment.spec import Experiment, Swap
from harness.serving.experiment.steps import decode_alone
from harness.serving.live.ab.arms import EngineArm
from harness.serving.live.ab.journal import FILE, LiveJournal
from harness.serving.live.ab.pairs import counted
from harness.serving.live.ab.rejection import RejectionRules
from harness.serving.live.ab.session import PairSettings
from harness.serving.live.ab.steps import steps
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.client.request_times import request_times
from harness.serving.live.live_engine import LiveEngine, LiveSetup, live_engine
from harness.serving.trace import decompose
from kernels.platform import detect, version

PLAIN_RUNS = 3
LOOK_SEED = 700_001  # of runs that do not count: no pair sends the same prompts


class Live(Protocol):
    """What an experiment asks of a serving engine. All raise HarnessError where it cannot be had."""

    def look(self) -> ObservedArm:
        """The base: kernel trace, routing log and plain runs."""

    def trace(self, swap: Swap | None, name: str) -> ObservedArm:
        """The kernel trace of a swap's arm, or of the base, in the folder observed/`name`."""

    def rest(self) -> None:
        """Servers that are up leave the machine to others until the next call."""

    def pairs(self, swap: Swap, pattern: tuple[int, ...], predicted: tuple[str, ...]) -> Paired:
        """All pairs of the swap against the base: those that are missing are made. The digests of what was
        predicted are in the journal before the first run."""


class EngineLive:
    """By a real engine on loopback, and a real client."""

    def __init__(self, experiment: Experiment, engine: LiveEngine) -> None:
        self.experiment, self.engine, self.folder = experiment, engine, engine.setup.folder

    def look(self) -> ObservedArm:
        observed = self._observed(None, "base", routing=True)
        runs = [self._plain(number) for number in range(PLAIN_RUNS)]
        module = self.engine.setup.kind.module
        installed = (version(module) if module else None) or ""
        return observed.model_copy(update={"runs": tuple(runs), "version": installed})

    def trace(self, swap: Swap | None, name: str) -> ObservedArm:
        return self._observed(swap, name, routing=False)

    def _observed(self, swap: Swap | None, name: str, routing: bool) -> ObservedArm:
        at = self.folder / "observed" / name
        files = self.engine.observe(
            engine_arm(self.experiment, swap), at, trace=True, routing=routing, seed=LOOK_SEED
        )
        trace, log = (str(f.relative_to(self.folder)) if f else "" for f in (files.trace, files.routing))
        return ObservedArm(trace=trace, routing=log, **decomposed(files.trace))

    def rest(self) -> None:
        self.engine.servers.rest()

    def _plain(self, number: int) -> LiveRun:
        result, started = self.folder / "observed" / "base" / f"plain-{number}.json", utc_now()
        self.engine.load(engine_arm(self.experiment, None), LOOK_SEED + 1 + number, result)
        times, load = request_times(result), self.engine.setup.load
        seen = steps(times.requests, min(load.concurrency, load.prompts), times.input_lens)
        file = str(result.relative_to(self.folder))
        return run_of({**seen.facts(), **times.means(), "started": started, "result": file})

    def pairs(self, swap: Swap, pattern: tuple[int, ...], predicted: tuple[str, ...]) -> Paired:
        settings = pair_settings(self.experiment, swap, pattern)
        plan = self.engine.setup.plan(settings, experiment=self.experiment.name, predicted=list(predicted))
        at = self.folder / "live" / swap.name
        journal = LiveJournal.begin(at, plan, resume=(at / FILE).exists())
        self.engine.pairs(settings, journal, self.engine.monitor(detect("cpu")))
        return paired(journal.lines(), "base", swap.name, f"live/{swap.name}")


@contextlib.contextmanager
def engine_live(
    experiment: Experiment, model: Path, folder: Path, say: Callable[[str], None]
) -> Iterator[Live]:
    """An engine's servers and its client; all are stopped when this ends, however it does."""
    engine = experiment.engine
    setup = LiveSetup(
        engine.kind,
        engine.client,
        model,
        folder,
        client_load(experiment),
        engine.flags,
        start_timeout_s=engine.start_timeout_s,
        run_timeout_s=engine.run_timeout_s,
    )
    with live_engine(setup, say) as live:
        yield EngineLive(experiment, live)


def client_load(experiment: Experiment) -> ClientLoad:
    load = experiment.load
    return ClientLoad(load.input_len, load.output_len, load.concurrency, load.prompts)


def engine_arm(experiment: Experiment, swap: Swap | None) -> EngineArm:
    """A swap's arm, or the base's."""
    if swap is None:
        return EngineArm("base", tuple(experiment.engine.environment.items()))
    environment = {**experiment.engine.environment, **swap.environment}
    return EngineArm(swap.name, tuple(environment.items()), swap.flags, swap.swap)


def pair_settings(experiment: Experiment, swap: Swap, pattern: tuple[int, ...]) -> PairSettings:
    """pattern: how requests must be prefilled together, where that matters"""
    load, any_pattern = experiment.load, decode_alone(experiment)
    rules = RejectionRules(
        () if any_pattern else pattern,
        any_pattern=any_pattern,
        disturbed=experiment.rules.disturbed,
        least_steady=experiment.rules.least_steady,
    )
    return PairSettings(
        (engine_arm(experiment, None), engine_arm(experiment, swap)),
        client_load(experiment),
        load.pairs,
        load.seed,
        rules,
        run_timeout_s=experiment.engine.run_timeout_s,
        slice_s=load.slice_s,
        renew=load.renew,
    )


def paired(lines: list[dict[str, Any]], base: str, arm: str, folder: str) -> Paired:
    """What a journal of live runs holds. Raises NothingRan where it has no run."""
    runs = [line for line in lines if line["kind"] == "run"]
    if not runs:
        raise NothingRan(f"{folder}: no run was made")
    by_pair = {(run["pair"], run["arm"]): run for run in counted(lines)}
    pairs = sorted({pair for pair, _ in by_pair})
    rejected: dict[str, int] = {}
    for run in runs:
        for reason in run["reasons"][:1] if run["status"] != "ok" else ():
            rejected[reason] = rejected.get(reason, 0) + 1
    lost = {line["pair"]: line for line in lines if line["kind"] == "given_up" and line["pair"] not in pairs}
    return Paired(
        begun=min(run["started"] for run in runs),
        pairs=tuple(
            (run_of(by_pair[pair, base], folder), run_of(by_pair[pair, arm], folder)) for pair in pairs
        ),
        given_up=tuple(f"pair {pair}: {'; '.join(line['reasons'])}" for pair, line in sorted(lost.items())),
        rejected=rejected,
    )


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def run_of(facts: Mapping[str, Any], folder: str = "") -> LiveRun:
    """A record of a live run."""
    return LiveRun(
        started=facts["started"],
        itl=facts.get("steady_itl_ms"),
        ttft=facts.get("mean_ttft_ms"),
        tpot=facts.get("mean_tpot_ms"),
        pattern=tuple(facts.get("prefill_pattern", ())),
        prefills=tuple(facts[f"prefill_{n}_ms"] for n, _ in enumerate(facts.get("prefill_pattern", ()), 1)),
        batch=facts.get("decoding_batch"),
        kv_len=facts.get("mean_kv_len"),
        file="/".join(filter(None, [folder, facts.get("result", "")])),
    )


def decomposed(trace: Path | None) -> dict[str, Any]:
    """Milliseconds of each op class in a decode step and in one that prefills (the median of the traced
    steps), and the kernels."""
    if trace is None:
        return {}
    parts = decompose(trace)

    def classes(phase: Literal["decode", "prefill"]) -> dict[str, float]:
        steps = {name: parts.per_step(name, phase) for name in parts.by_class(phase)}
        return {name: per.exposed_us / 1e3 for name, per in steps.items() if per}

    spans = sorted(step.span_ns for step in parts.steps_of("decode"))
    return {
        "classes": classes("decode"),
        "prefill": classes("prefill"),
        "step_ms": spans[len(spans) // 2] / 1e6 if spans else None,
        "kernels": tuple(sorted({kernel.name for kernel in parts.kernels})),
    }
