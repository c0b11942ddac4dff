"""The live part of an experiment: a thin binding to harness/serving/live."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from harness.errors import NothingRan
from harness.serving.experiment.schema import Paired, Run, Seen
from harness.serving.experiment.spec import Experiment, Swap
from harness.serving.experiment.steps import decode_alone

PLAIN_RUNS = 3
LOOK_SEED = 700_001  # of runs that do not count: no pair sends the same prompts


class Live(Protocol):
    """What an experiment asks of a serving engine. All raise HarnessError where it cannot be had."""

    def look(self) -> Seen:
        """The base: kernel trace, routing log and plain runs."""

    def trace(self, swap: Swap | None, name: str) -> Seen:
        """The kernel trace of a swap's arm, or of the base, in the folder observed/`name`."""

    def rest(self) -> None:
        """Servers that are up leave the machine to others until the next call."""

    def pairs(self, swap: Swap, pattern: tuple[int, ...], predicted: tuple[str, ...]) -> Paired:
        """All pairs of the swap against the base: those that are missing are made. The digests of what was
        predicted are in the journal before the first run."""


class EngineLive:
    """By a real engine on loopback, and a real client."""

    def __init__(self, experiment: Experiment, model: Path, folder: Path, say: Callable[[str], None]) -> None:
        from harness.serving.live.client.client import Client
        from harness.serving.live.client.load import Load
        from harness.serving.live.engine import launch
        from harness.serving.live.engine.servers import Servers

        engine, load = experiment.engine, experiment.load
        self.experiment, self.folder, self.say = experiment, folder, say
        self.load = Load(load.input_len, load.output_len, load.concurrency, load.prompts)
        kind = launch.kind_for(engine.kind)
        self.module = kind.module
        self.client = Client(engine.client, engine.kind, model, folder)
        self.servers = Servers(
            kind,
            model,
            folder,
            self.client,
            self.load,
            flags=engine.flags,
            start_timeout_s=engine.start_timeout_s,
            say=say,
        )

    def __enter__(self) -> EngineLive:
        return self

    def __exit__(self, *_: object) -> None:
        with self.client:
            self.servers.__exit__(None, None, None)

    def _arm(self, swap: Swap | None) -> Any:
        from harness.serving.live.ab.arms import Arm

        environment = {**self.experiment.engine.environment, **(swap.environment if swap else {})}
        flags, swaps = (swap.flags, swap.swap) if swap else ((), ())
        return Arm(swap.name if swap else "base", tuple(environment.items()), flags, swaps)

    def look(self) -> Seen:
        from kernels.platform import version

        arm = self._arm(None)
        seen = self._observed(arm, arm.name, routing=True)
        runs = [
            self._plain(arm, self.folder / "observed" / arm.name / f"plain-{n}.json", n)
            for n in range(PLAIN_RUNS)
        ]
        of_engine = (version(self.module) if self.module else None) or ""
        return seen.model_copy(update={"runs": tuple(runs), "version": of_engine})

    def trace(self, swap: Swap | None, name: str) -> Seen:
        return self._observed(self._arm(swap), name, routing=False)

    def _observed(self, arm: Any, name: str, routing: bool) -> Seen:
        from harness.serving.live.engine.observe import observe

        at, timeout = self.folder / "observed" / name, self.experiment.engine.run_timeout_s
        found = observe(
            self.servers, self.client, arm, self.load, at,
            routing=routing, seed=LOOK_SEED, run_timeout_s=timeout,
        )  # fmt: skip
        return Seen(
            trace=self._inside(found.trace), routing=self._inside(found.routing), **decomposed(found.trace)
        )

    def rest(self) -> None:
        self.servers.rest()

    def _inside(self, file: Path | None) -> str:
        return str(file.relative_to(self.folder)) if file else ""

    def _plain(self, arm: Any, result: Path, number: int) -> Run:
        from harness.serving.live.ab.steps import steps
        from harness.serving.live.client.requests import details

        engine, started = self.servers.get(arm), utc_now()
        self.client.run(
            engine.url,
            engine.launch.model_name,
            self.load,
            LOOK_SEED + 1 + number,
            result,
            self.experiment.engine.run_timeout_s,
            watch=lambda: engine.check("while it was looked into"),
        )
        found = details(result)
        seen = steps(found.requests, min(self.load.concurrency, self.load.prompts), found.input_lens)
        return run_of({**seen.facts(), **found.means(), "started": started, "result": self._inside(result)})

    def pairs(self, swap: Swap, pattern: tuple[int, ...], predicted: tuple[str, ...]) -> Paired:
        from harness.machine.monitor import monitor_for
        from harness.machine.provenance import surroundings
        from harness.serving.live.ab.journal import FILE, Journal
        from harness.serving.live.ab.rejection import Rules
        from harness.serving.live.ab.session import Session, Settings
        from kernels.platform import detect

        experiment, load = self.experiment, self.experiment.load
        any_pattern = decode_alone(experiment)
        rules = Rules(
            () if any_pattern else pattern,
            any_pattern=any_pattern,
            disturbed=experiment.rules.disturbed,
            least_steady=experiment.rules.least_steady,
        )
        arms = (self._arm(None), self._arm(swap))
        settings = Settings(
            arms,
            self.load,
            load.pairs,
            load.seed,
            rules,
            run_timeout_s=experiment.engine.run_timeout_s,
            slice_s=load.slice_s,
            renew=load.renew,
        )
        plan = {
            "schema": 1,
            "experiment": experiment.name,
            "model": self.servers.model.name,
            "engine": experiment.engine.kind,
            "client": experiment.engine.client,
            "flags": list(experiment.engine.flags),
            "arms": [arm.facts() for arm in arms],
            "load": self.load.facts(),
            "pairs": load.pairs,
            "seed": load.seed,
            "slice_s": load.slice_s,
            "renew": load.renew,
            "rules": rules.facts(),
            "predicted": list(predicted),
            **surroundings(),
        }
        at = self.folder / "live" / swap.name
        journal = Journal.resume(at, plan) if (at / FILE).exists() else Journal.create(at, plan)
        monitor = monitor_for(detect("cpu"), lambda: [*self.servers.pids(), *self.client.pids()])
        Session(settings, self.servers, self.client, journal, monitor, self.say).run()
        return paired(journal.lines(), "base", swap.name, f"live/{swap.name}")


def paired(lines: list[dict[str, Any]], base: str, arm: str, folder: str) -> Paired:
    """What a journal of live runs holds. Raises NothingRan where it has no run."""
    from harness.serving.live.ab.pairs import counted

    runs = [line for line in lines if line["kind"] == "run"]
    if not runs:
        raise NothingRan(f"{folder}: no run was made")
    found = {(run["pair"], run["arm"]): run for run in counted(lines)}
    pairs = sorted({pair for pair, _ in found})
    rejected: dict[str, int] = {}
    for run in runs:
        for reason in run["reasons"][:1] if run["status"] != "ok" else ():
            rejected[reason] = rejected.get(reason, 0) + 1
    lost = {line["pair"]: line for line in lines if line["kind"] == "given_up" and line["pair"] not in pairs}
    return Paired(
        begun=min(run["started"] for run in runs),
        pairs=tuple((run_of(found[pair, base], folder), run_of(found[pair, arm], folder)) for pair in pairs),
        given_up=tuple(f"pair {pair}: {'; '.join(line['reasons'])}" for pair, line in sorted(lost.items())),
        rejected=rejected,
    )


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def run_of(facts: Mapping[str, Any], folder: str = "") -> Run:
    """A record of a live run."""
    return Run(
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
    from harness.serving.trace import decompose

    if trace is None:
        return {}
    found = decompose(trace)

    def classes(phase: str) -> dict[str, float]:
        steps = {name: found.per_step(name, phase) for name in found.by_class(phase)}
        return {name: per.exposed_us / 1e3 for name, per in steps.items() if per}

    spans = sorted(step.span_ns for step in found.steps_of("decode"))
    return {
        "classes": classes("decode"),
        "prefill": classes("prefill"),
        "step_ms": spans[len(spans) // 2] / 1e6 if spans else None,
        "kernels": tuple(sorted({kernel.name for kernel in found.kernels})),
    }


@contextlib.contextmanager
def engine_live(
    experiment: Experiment, model: Path, folder: Path, say: Callable[[str], None]
) -> Iterator[Live]:
    """An engine's servers and its client; all are stopped when this ends, however it does."""
    with EngineLive(experiment, model, folder, say) as live:
        yield live
