"""Replay of a step: its arms measured against each other, and what isolated calls would have said."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import kernels
from harness.errors import NothingRan, UsageError
from harness.machine.monitor.base import Monitor
from harness.paths import portable
from harness.serving.replay.schema import CONFIDENCE, Replay, ReplayArm, Timed
from harness.serving.replay.step import ReplayStep, StepPlace, calls, places
from harness.statistics.intervals import interval
from harness.timing.interleaved import measure
from harness.timing.rounds import Disturbed, Policy, Rounds
from harness.workers.environment import provenance, thread_environment
from harness.workers.process import Worker, WorkerFailure
from kernels.platform import Platform

RANK = "harness.serving.replay.child:Rank"
TURN_S = 0.25
ISOLATED_S = 0.05  # a turn of one place's calls alone
BASE, TWIN = "base", "base again"
DECOMPOSED = 7  # steps, each call of which is timed by itself, and turns of isolated calls
ALIKE = 0.05  # relative difference of two right outputs, at most: FP8 activations, rounded twice, give 0.04
LEFT_OUT = ["scheduler, tokeniser and HTTP", "rank skew"]


@dataclass(frozen=True)
class ReplayPlan:
    """arms: name -> `op` or `op:place` -> implementation; the first is the base.

    rounds: in each block, at most
    decomposed: steps each call of which is timed by itself, and turns of isolated calls; their medians count
    disturbed: whether rounds that other work disturbed count
    environment: variables of the process that replays, as the engine has them; None: not set
    """

    step: ReplayStep
    arms: Mapping[str, Mapping[str, str]]
    launch: str
    threads: int
    budget_s: float
    _: KW_ONLY
    blocks: int = 6
    rounds: int = 12
    seed: int = 0
    turn_s: float = TURN_S
    prepare_s: float = 900.0
    call_s: float = 120.0
    decomposed: int = DECOMPOSED
    disturbed: Disturbed = "prefer"
    environment: Mapping[str, str | None] = field(default_factory=dict)


Say = Callable[[str], None]


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def replay(plan: ReplayPlan, platform: Platform, monitor: Monitor, say: Say = to_stderr) -> Replay:
    """Measures the arms in interleaved rounds, each block on operands made anew. An arm that cannot be
    prepared is noted and left out; raises NothingRan where the base cannot."""
    arms = {name: ReplayArm(chosen=dict(chosen)) for name, chosen in plan.arms.items()}
    base = next(iter(arms))
    with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
        threads = thread_environment(platform, plan.threads)
        worker = Worker(
            RANK,
            threads | dict(plan.environment),
            Path(scratch) / "replay.log",
            plugins=[str(path) for path in kernels.plugin_files()],
        )
        try:
            worker.hello(platform, plan.threads, plan.prepare_s)
            rounds = _measured(plan, arms, worker, platform, monitor, say)
            arms = _decomposed(plan, arms, base, worker)
            finite = worker.ask("finite", plan.call_s)
        except WorkerFailure as failure:
            raise NothingRan(f"the step could not be replayed: {failure.reason}") from None
        finally:
            worker.kill()
    arms, twin = _compared(plan.step, arms, base, rounds)
    return Replay(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=tuple(map(portable, sys.argv[1:])),
        step=_facts(plan.step),
        launch=plan.launch,
        threads=plan.threads,
        environment=dict(plan.environment),
        base=base,
        arms=arms,
        twin=twin,
        rounds=len(rounds.rounds),
        disturbed=len(rounds.disturbed),
        stopped=rounds.stopped,
        left_out=tuple(left_out(plan.step)),
        notes=() if finite else ("the last step's logits were not all finite",),
        samples=tuple({"block": r.block, "round": r.index, **r.seconds} for r in rounds.rounds),
        provenance=provenance(platform, plan.threads),
    )


def left_out(step: ReplayStep) -> list[str]:
    """What a step of a serving engine has and this one has not."""
    reduce = 2 * step.layers if step.parallel.tp > 1 else 0
    return [*([f"{reduce} all-reduces of TP{step.parallel.tp}"] if reduce else []), *LEFT_OUT]


def _facts(step: ReplayStep) -> dict[str, Any]:
    facts = asdict(step)
    facts["model"] = step.model.name
    facts["picks"] = "recorded" if step.picks else step.routing
    facts["tokens"] = step.tokens
    return facts


def _measured(
    plan: ReplayPlan,
    arms: dict[str, ReplayArm],
    worker: Worker,
    platform: Platform,
    monitor: Monitor,
    say: Say,
) -> Rounds:
    names = [*arms, TWIN]
    base = names[0]

    def begin(block: int, contenders: Collection[str]) -> None:
        say(f"block {block + 1} of up to {plan.blocks}: {len(contenders)} arms")
        worker.ask("open", plan.prepare_s, step=plan.step, seed=plan.seed + block, launch=plan.launch)
        for name in names:
            if name not in contenders:
                continue
            chosen = arms[base if name == TWIN else name].chosen
            try:
                worker.ask(
                    "prepare",
                    plan.prepare_s,
                    arm=name,
                    chosen=chosen,
                    apart=name == TWIN and platform.kind == "cpu",
                )
            except WorkerFailure as failure:
                if failure.fatal or name == base:
                    raise
                arms[name] = arms[name].model_copy(update={"failed": failure.reason})

    def turn(name: str) -> float:
        if name in arms and arms[name].failed:
            raise RuntimeError(arms[name].failed)
        with monitor.watching(name):
            return worker.ask("turn", plan.call_s, arm=name, at_least=plan.turn_s)

    policy = Policy(
        blocks=plan.blocks,
        first_rounds=min(4, plan.rounds),
        max_rounds=plan.rounds,
        half_width=0.0,
        anchor=base,
        twin=TWIN,
        budget_s=plan.budget_s,
        begin_block=begin,
        begin_round=monitor.begin,
        end_round=monitor.end,
        disturbed=plan.disturbed,
        seed=plan.seed,
    )
    return measure({name: partial(turn, name) for name in names}, policy)


def _decomposed(
    plan: ReplayPlan, arms: dict[str, ReplayArm], base: str, worker: Worker
) -> dict[str, ReplayArm]:
    """Each arm with the times of its places, and of its swapped calls alone."""
    order = places(plan.step)
    decomposed = {}
    for name, arm in arms.items():
        if arm.failed:
            decomposed[name] = arm
            continue
        by_key = worker.ask("decompose", plan.prepare_s, arm=name, repeats=plan.decomposed)
        by_place: dict[str, float] = defaultdict(float)
        by_class: dict[str, float] = defaultdict(float)
        for place in order:
            by_place[place.name] += 1e3 * by_key[place.key]
            by_class[place.op_class] += 1e3 * by_key[place.key]
        update: dict[str, Any] = {"places": dict(by_place), "classes": dict(by_class)}
        if name != base:
            update |= _isolated(plan, arms[base].chosen, arm.chosen, worker)
            apart = {k: v for k, v in update["difference"].items() if not v <= ALIKE}
            if apart:
                update["failed"] = f"wrong: its outputs differ from the base's: {apart}"
            swapped = _swapped(plan.step, arms[base].chosen, arm.chosen)
            ours, theirs = update["places"], decomposed[base].places
            update["own"] = sum(ours[place] - theirs[place] for place in swapped)
        decomposed[name] = arm.model_copy(update=update)
    return decomposed


def _swapped(step: ReplayStep, base: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Places whose implementation differs from the base's -> their op."""
    return {
        place.name: place.op for place in places(step) if place.op and _of(place, chosen) != _of(place, base)
    }


def _of(place: StepPlace, chosen: Mapping[str, str]) -> str:
    return chosen.get(f"{place.op}:{place.name}") or chosen[place.op]


def _isolated(
    plan: ReplayPlan, base: Mapping[str, str], chosen: Mapping[str, str], worker: Worker
) -> dict[str, Any]:
    swapped = _swapped(plan.step, base, chosen)
    changes = {"warm": 0.0, "cold": 0.0}
    for name in swapped:
        place = next(p for p in places(plan.step) if p.name == name)
        times = len([p for p in places(plan.step) if p.name == name])
        for mode in changes:
            arguments = {"place": name, "cold": mode == "cold", "at_least": ISOLATED_S}
            differences = []
            for _ in range(plan.decomposed):
                new, old = (
                    worker.ask("isolated", plan.call_s, name=_of(place, which), **arguments)
                    for which in (chosen, base)
                )
                differences.append(new - old)
            changes[mode] += 1e3 * times * statistics.median(differences)
    difference: dict[str, float] = {}
    for op in dict.fromkeys(swapped.values()):
        difference |= worker.ask("difference", plan.call_s, op=op, a=dict(base), b=dict(chosen))
    return changes | {"difference": {k: v for k, v in difference.items() if k in swapped}}


def _compared(
    step: ReplayStep, arms: dict[str, ReplayArm], base: str, rounds: Rounds
) -> tuple[dict[str, ReplayArm], Timed | None]:
    compared = {}
    for name, arm in arms.items():
        if arm.failed:  # a wrong one has no time either
            compared[name] = arm
            continue
        update: dict[str, Any] = {"step": _timed(rounds, name)}
        if name != base and update["step"] is not None:
            update["change"] = _timed(rounds, name, base)
            update["whole"] = _whole(step, arms[base].chosen, arm.chosen, update["change"])
        elif name in rounds.dropped:
            update["failed"] = rounds.dropped[name]
        compared[name] = arm.model_copy(update=update)
    return compared, _timed(rounds, TWIN, base)


def _timed(rounds: Rounds, name: str, less: str = "") -> Timed | None:
    pairs = [
        (r.block, 1e3 * (r.seconds[name] - (r.seconds[less] if less else 0.0)))
        for r in rounds.rounds
        if name in r.seconds and (not less or less in r.seconds)
    ]
    if not pairs:
        return None
    over = interval(pairs, CONFIDENCE)
    known = len({block for block, _ in pairs}) > 1
    return Timed(ms=over.mean, low=over.low if known else None, high=over.high if known else None)


def _whole(
    step: ReplayStep, base: Mapping[str, str], chosen: Mapping[str, str], change: Timed | None
) -> Timed | None:
    """The change in a step of the whole model: by the number of the swapped calls."""
    counts = [calls(step, op, place) for place, op in _swapped(step, base, chosen).items()]
    replayed, whole = sum(r for r, _ in counts), sum(w for _, w in counts)
    if change is None or whole == replayed or not replayed:
        return None
    scale = whole / replayed
    low, high = (None if bound is None else bound * scale for bound in (change.low, change.high))
    return Timed(ms=change.ms * scale, low=low, high=high)


def require_known(arms: Mapping[str, Mapping[str, str]], step: ReplayStep) -> None:
    """Raises UsageError where an arm names an op, a place or an implementation that there is not, or is the
    base, the first, by another name."""
    names = {(p.op, p.name) for p in places(step) if p.op}
    for chosen in arms.values():
        for key, implementation in chosen.items():
            op, _, place = key.partition(":")
            if op not in kernels.OPS:
                raise UsageError(f"unknown op {op!r}; ops: {', '.join(kernels.OPS)}")
            if place and (op, place) not in names:
                own = ", ".join(sorted(name for o, name in names if o == op))
                raise UsageError(f"{op} has no place {place!r} in this step; places: {own}")
            known = [i.name for i in kernels.implementations(op)]
            if implementation not in known:
                raise UsageError(
                    f"unknown implementation {implementation!r} of {op}; see: list impls --op {op}"
                )
    base, *others = arms.values()
    for name, chosen in zip([*arms][1:], others, strict=True):
        if all(base.get(key, base.get(key.partition(":")[0])) == chosen[key] for key in chosen):
            raise UsageError(
                f"{name} is what the base runs, which is held against itself in any case; the base: "
                + ", ".join(f"{op}={implementation}" for op, implementation in base.items())
            )
