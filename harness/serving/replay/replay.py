"""The replay of a step: what is asked for, its arms compared in the step, and their calls alone."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, ConfigDict, Field
from rich.console import Group, RenderableType

import kernels
from harness.errors import NothingRan, UsageError
from harness.machine.cpu_threads import default_threads
from harness.machine.monitor.base import Monitor
from harness.paths import portable
from harness.plan.budget import parse_seconds
from harness.plan.select import launches, unknown_implementation
from harness.report.fitting_table import table_of
from harness.report.notes import printed_notes
from harness.report.text import ranged
from harness.serving.replay.step import OP_CLASS, ReplayStep, StepPlace
from harness.serving.schema import StrictRecord
from harness.statistics.intervals import interval
from harness.timing.rounds import Policy, Rounds, measure
from harness.workers.environment import provenance, thread_environment
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.platform import Platform, free_memory
from shapes.attention import Parallel
from shapes.case import parse
from shapes.models import named_model

CONFIDENCE = 0.9


class Timed(StrictRecord):
    """Milliseconds of a step, or a difference of two, with a 90 % interval over blocks."""

    ms: float
    low: float | None = None
    high: float | None = None

    def text(self, form: str = "+.4g") -> str:
        return ranged(self.ms, self.low, self.high, form)


class ReplayArm(StrictRecord):
    """One choice of implementations. Of older records, calls that were waited for are left out: on a GPU they
    tell nothing of the step.

    chosen:       from `op` or `op:place` to implementation
    change:       the step less the base's step, from paired rounds; None for the base
    whole:        `change` for the model's full number of layers, if fewer were replayed
    alone:        what the swapped calls change without the rest of the step; `cold` in older records
    places_alone: milliseconds of all layers' calls of a place in turn, without the rest of the step and
                  launched as it is: for the base of all places, for an arm of the swapped ones
    difference:   of the swapped outputs from the base's, relative, in the first layer
    failed:       why it has no times; empty: it has them
    unsupported:  whether it failed because it cannot run here, which is no mistake
    """

    model_config = ConfigDict(extra="ignore")

    chosen: dict[str, str]
    step: Timed | None = None
    change: Timed | None = None
    whole: Timed | None = None
    alone: float | None = Field(default=None, validation_alias=AliasChoices("alone", "cold"))
    places_alone: dict[str, float] = Field(default_factory=dict)
    difference: dict[str, float] = Field(default_factory=dict)
    failed: str = ""
    unsupported: bool = False

    def classes_alone(self) -> dict[str, float]:
        """Milliseconds of the places by op class, the longest first."""
        classes: dict[str, float] = {}
        for place, ms in self.places_alone.items():
            classes[OP_CLASS[place]] = classes.get(OP_CLASS[place], 0.0) + ms
        return dict(sorted(classes.items(), key=lambda item: -item[1]))

    def verdict(self) -> str:
        """What the change says, and how far the outputs are from the base's."""
        if self.failed or self.change is None:
            return self.failed
        low, high = self.change.low or 0.0, self.change.high or 0.0
        word = "faster" if high < 0 else "slower" if low > 0 else "no change seen"
        other = {"faster": "slower", "slower": "faster"}.get(word, "")
        if other and (self.alone or 0.0) * self.change.ms < 0:
            word = f"{other} alone, {word} in the step"
        return f"{word}; outputs {max(self.difference.values(), default=0.0):.1e} apart"


class Replay(StrictRecord):
    """twin: the base against itself: the change that is none; samples: block, round, arm -> seconds"""

    model_config = ConfigDict(extra="ignore")

    created: str
    command: tuple[str, ...]
    step: dict[str, Any]
    launch: str
    threads: int
    base: str
    arms: dict[str, ReplayArm]
    twin: Timed | None = None
    rounds: int = 0
    disturbed: int = 0
    stopped: str = ""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    provenance: dict[str, Any] = Field(default_factory=dict)

    def table(self) -> RenderableType:
        """The step, what each arm changes in it and would change alone, and where the base's time goes."""
        step, base = self.step, self.arms[self.base]
        rows = [
            {"arm": name, "change ms": arm.change and arm.change.text(), "verdict": arm.verdict(),
             "step ms": arm.step and arm.step.text(".4g"),
             "alone ms": None if arm.alone is None else f"{arm.alone:+.4g}",
             "whole model ms": arm.whole and arm.whole.text()}
            for name, arm in self.arms.items()
        ]  # fmt: skip
        classes = base.classes_alone()
        total = sum(classes.values())
        shares = ", ".join(f"{name} {ms:.3g} ({ms / total:.0%})" for name, ms in classes.items())
        what = (
            f"decode step of {step['model']}, tp={step['parallel']['tp']}: batch {step['batch']}, "
            f"ctx {step['ctx']}, {step['dense']} dense and {step['moe']} MoE layers, page {step['page']}, "
            f"kv {step['kv']}, routing {step['routing']}, {self.launch}, {self.threads} threads"
        )
        notes = [
            ("base", ", ".join(f"{op}={name}" for op, name in base.chosen.items())),
            ("noise", f"the base against itself: {self.twin.text()} ms" if self.twin else ""),
            ("alone", f"the base's calls, {total:.4g} ms: {shares}" if classes else ""),
            ("left out", ", ".join(self.left_out)),
            *(("note", text) for text in self.notes),
            ("measured", f"rounds: {self.rounds}, disturbed: {self.disturbed} more; intervals are of 90 %"),
        ]
        return Group(what, "", table_of(rows), "", printed_notes([note for note in notes if note[1]]))


RANK = "harness.serving.replay.child:Rank"
PREPARE_S, CALL_S = 900.0, 120.0
BLOCKS, ROUNDS, SAMPLE_S = 6, 12, 0.25  # blocks, rounds in each and most seconds of a sample
ALONE_S, ALONE_SAMPLES = 0.05, 7  # seconds and number of samples of the calls of a place alone
BASE, RERUN = "base", "base again"
ALIKE = 0.05  # the most by which two right outputs differ, relative: FP8 activations give 0.04
SHARE = 0.92  # of memory: nothing else is on the device, and no further sets of operands rotate

Numbers = Mapping[str, float]
Arms = dict[str, dict[str, str]]  # from name to `op` or `op:place` to implementation; BASE is among the names


@dataclass(frozen=True)
class ReplayPlan:
    step: ReplayStep
    arms: Arms
    budget_s: float
    notes: Sequence[str] = ()


def plans(
    platform: Platform, *, model: str = "deepseek-r1", tp: int = 1, batch: str = "4", ctx: int = 1024,
    case: str | None = None, layers: str | None = None, base: Sequence[str] = (), swap: Sequence[str] = (),
    budget: str = "60s",
) -> Iterator[ReplayPlan]:  # fmt: skip
    """One plan for each batch size, with an arm for each `swap`. Raises UsageError or NothingRan."""
    budget_s = parse_seconds(budget, "--budget")
    sizes = {"page": "16" if platform.kind == "cpu" else "64", "kv": "bf16", "routing": "balanced"}
    try:
        rank = named_model(model)
        lacks = [
            *rank.unheld.values(),
            *(f"its {name} is in bf16" for name in rank.parts if name in rank.unquantised),
        ]
        if lacks or not rank.q_lora_rank:
            raise UsageError(f"{rank.name} cannot be replayed: {[*lacks, 'its queries have no latent'][0]}")
        if not re.fullmatch(r"\d+(,\d+)*", batch):
            raise UsageError(f"--batch takes numbers, not {batch!r}")
        given, *more = parse(case) if case else [{}]
        if more or given.keys() - sizes.keys() or not given.get("page", "1").isdecimal():
            raise UsageError(f"--case takes one page=NUMBER, kv=DTYPE, routing=NAME each, not {case!r}")
        page, kv, routing = (sizes | given).values()
        dense, moe = rank.first_k_dense_replace, rank.num_hidden_layers - rank.first_k_dense_replace
        for requests in map(int, batch.split(",")):
            whole = ReplayStep(rank, Parallel(tp=tp), requests, ctx, dense, moe, int(page), kv, routing)
            for place in whole.op_places():
                kernels.OPS[place.op].sizes(whole.sizes(place))
            arms = read_arms(whole, platform, base, swap)
            step, notes = fitted(whole, layers, arms, platform)
            yield ReplayPlan(step, arms, budget_s, notes)
    except ValueError as error:
        raise UsageError(str(error)) from None


def read_arms(step: ReplayStep, platform: Platform, base: Sequence[str], swap: Sequence[str]) -> Arms:
    """The arms from texts `op=impl`: those of the base; and each swap, of one or more by commas, is an arm.
    Raises UsageError if one names an unknown op, place or implementation, or is the base by another name, and
    NothingRan if no swap can run here."""
    places, chosen = step.op_places(), {}
    for op in sorted({place.op for place in places}):
        like, baseline = kernels.OPS[op].engine_like, kernels.OPS[op].baseline[platform.kind]
        chosen[op] = like if like and platform.kind != "cpu" else baseline
    chosen |= _choices(places, ",".join(base), "--base")
    arms, swaps = {BASE: chosen}, {text: _choices(places, text, "--swap") for text in swap}
    for text, swapped in swaps.items():
        arms[text] = chosen | swapped
        if all(place.implementation(arms[text]) == place.implementation(chosen) for place in places):
            runs = ", ".join(f"{op}={name}" for op, name in chosen.items())
            raise UsageError(f"--swap {text!r} is what the base runs; the base: {runs}")
    if swaps and all(lacking := [_lacking(swapped, platform) for swapped in swaps.values()]):
        raise NothingRan("; ".join(dict.fromkeys(lacking)))
    return arms


def _lacking(choices: Mapping[str, str], platform: Platform) -> str:
    """The first row that cannot run here, with the reason; empty if all can."""
    chosen = [(op.partition(":")[0], name) for op, name in choices.items()]
    rows = (row for op, name in chosen for row in kernels.implementations(op) if row.name == name)
    return next(
        (f"{row.name} {support.reason}" for row in rows if not (support := row.available(platform)).ok), ""
    )


def _choices(places: Sequence[StepPlace], texts: str, option: str) -> dict[str, str]:
    known, choices = {part for each in places for part in (each.op, f"{each.op}:{each.name}")}, {}
    for text in filter(None, texts.split(",")):
        key, _, name = (part.strip() for part in text.partition("="))
        op = key.partition(":")[0]
        if not (op and name):
            raise UsageError(f"{option} takes OP=IMPL or OP:PLACE=IMPL, not {text!r}")
        if key not in known:
            raise UsageError(f"this step calls no {key!r}; it calls: {', '.join(sorted(known))}")
        if name not in [row.name for row in kernels.implementations(op)]:
            raise unknown_implementation(op, name)
        choices[key] = name
    return choices


def fitted(
    step: ReplayStep, layers: str | None, arms: Arms, platform: Platform
) -> tuple[ReplayStep, tuple[str, ...]]:
    """The step with the layers that the device holds for all arms, or `DENSE,MOE`; a note if not all fit."""
    whole, memory = step, free_memory(platform)
    if layers:
        if not re.fullmatch(r"\d+,\d+", layers):
            raise UsageError(f"--layers takes DENSE,MOE, two numbers such as 1,4, not {layers!r}")
        dense, moe = map(int, layers.split(","))
        if dense > whole.dense or moe > whole.moe:
            raise UsageError(
                f"--layers {layers}: the model has {whole.dense} dense and {whole.moe} MoE layers"
            )
        try:
            step = replace(step, dense=dense, moe=moe)
        except ValueError as error:
            raise UsageError(f"--layers takes DENSE,MOE, not {layers!r}: {error}") from None
    elif memory is not None:
        room = SHARE * memory
        while step.moe > 1 and needed(step, arms) > room:
            step = replace(step, moe=step.moe - 1)
        if needed(step, arms) > room:
            larger = [
                replace(step, parallel=Parallel(tp=tp)) for tp in (2, 4, 8, 16) if tp > step.parallel.tp
            ]
            fits = [f"--tp {each.parallel.tp} fits" for each in larger if needed(each, arms) <= room]
            raise NothingRan(
                f"a step of {step.dense} dense and {step.moe} MoE layers of --tp {step.parallel.tp} takes "
                f"{needed(step, arms) / 2**30:.1f} GiB, and {memory / 2**30:.1f} GiB are free: "
                + next(iter(fits), "take fewer --layers or --swap, a smaller --batch")
            )
    if step == whole:
        return step, ()
    replayed = f"{step.dense} of {whole.dense} dense and {step.moe} of {whole.moe} MoE layers were replayed"
    return step, (f"{replayed}; `whole model` is the change times the number of swapped calls",)


def needed(step: ReplayStep, arms: Arms) -> float:
    """Bytes of operands, outputs and the layouts of each arm. Workspaces are small beside them."""
    total = 2.0 * step.linear("lm_head").n * step.model.hidden_size
    for place, count in Counter(replace(place, layer=0) for place in step.op_places()).items():
        op = kernels.OPS[place.op]
        sizes = op.sizes(step.sizes(place))
        names = {place.implementation(chosen) for chosen in arms.values()}
        layouts = sum(row.layout(sizes) for row in kernels.implementations(op.name) if row.name in names)
        total += count * (op.operand_bytes(sizes) + op.output_bytes(sizes) + layouts)
    return total


def replay(plan: ReplayPlan, platform: Platform, monitor: Monitor) -> Replay:
    """Measures the arms in interleaved rounds, each block on operands made anew. An arm that cannot be
    prepared, or is wrong, is noted and left out. Raises NothingRan if the base cannot be prepared."""
    threads, launch = default_threads(), launches(platform, None)[0]
    failed, unsupported, notes = dict[str, str](), set[str](), [*plan.notes]
    with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
        environment, log = thread_environment(platform, threads), Path(scratch) / "replay.log"
        worker = WorkerProcess(RANK, environment, log, plugins=[str(path) for path in kernels.plugin_files()])
        try:
            worker.hello(platform, threads, PREPARE_S)
            rounds = _measured(plan, launch, failed, unsupported, worker, monitor)
            failed |= rounds.dropped
            differences = _differences(plan, failed, worker)
            alone = _alone(plan, {n: d for n, d in differences.items() if n not in failed}, worker, notes)
        except WorkerFailure as failure:
            raise NothingRan(f"the step could not be replayed: {failure.reason}") from None
        finally:
            worker.kill()
    arms = {}
    for name, chosen in plan.arms.items():
        right = name not in failed  # a wrong one has no time either
        times = _times(plan.step, name, differences[name], rounds, alone) if right else {}
        reason, cannot_run = failed.get(name, ""), name in unsupported
        arms[name] = ReplayArm(chosen=chosen, failed=reason, unsupported=cannot_run, **times)
    return Replay(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=tuple(map(portable, sys.argv[1:])), step=asdict(plan.step) | {"model": plan.step.model.name},
        launch=launch, threads=threads, base=BASE, arms=arms, twin=_timed(rounds, RERUN, BASE),
        rounds=len(rounds.rounds), disturbed=len(rounds.left_out), stopped=rounds.stopped,
        left_out=(*plan.step.all_reduces, "scheduler", "HTTP", "rank skew"), notes=tuple(notes),
        samples=tuple({"block": r.block, "round": r.index, **r.seconds} for r in rounds.rounds),
        provenance=provenance(platform, threads),
    )  # fmt: skip


def _measured(
    plan: ReplayPlan, launch: str, failed: dict[str, str], unsupported: set[str], worker: WorkerProcess,
    monitor: Monitor,
) -> Rounds:  # fmt: skip
    """The rounds of the arms and of the base again. failed: gets the arms that cannot be prepared, with the
    reason; unsupported: gets those of them that cannot run here"""
    arms = plan.arms | {RERUN: plan.arms[BASE]}

    def begin(block: int, contenders: Collection[str]) -> None:
        print(f"block {block + 1} of up to {BLOCKS}: {len(contenders)} arms", file=sys.stderr)
        worker.ask("open", PREPARE_S, step=plan.step, seed=block, launch=launch)
        for name in [name for name in arms if name in contenders]:
            try:
                worker.ask("prepare", PREPARE_S, arm=name, chosen=arms[name])
            except WorkerFailure as failure:
                if failure.fatal or name == BASE:
                    raise
                failed[name] = failure.reason
                if failure.status == "unsupported":
                    unsupported.add(name)

    def turn(name: str) -> float:
        if name in failed:
            raise RuntimeError(failed[name])
        with monitor.watching(name):
            return worker.ask("sample", CALL_S, arm=name, at_least=SAMPLE_S)

    policy = Policy(
        blocks=BLOCKS, first_rounds=min(4, ROUNDS), max_rounds=ROUNDS, half_width=0.0, baseline=BASE,
        rerun=RERUN, budget_s=plan.budget_s, begin_block=begin, begin_round=monitor.begin,
        end_round=monitor.end, )  # fmt: skip
    return measure({name: partial(turn, name) for name in arms}, policy)


def _differences(
    plan: ReplayPlan, failed: dict[str, str], worker: WorkerProcess
) -> dict[str, dict[str, float]]:
    """The difference of each arm's swapped places from the base's. failed: gets the arms that are wrong"""
    found = {}
    for name in [name for name in plan.arms if name not in failed]:
        found[name] = worker.ask("difference", CALL_S, base=plan.arms[BASE], chosen=plan.arms[name])
        if apart := {place: value for place, value in found[name].items() if not value <= ALIKE}:
            failed[name] = f"wrong: its outputs differ from the base's: {apart}"
    return found


def _alone(
    plan: ReplayPlan, swapped: Mapping[str, Collection[str]], worker: WorkerProcess, notes: list[str]
) -> dict[str, dict[str, float]]:
    """The ms that each place's calls take alone, in the base and in each arm that swaps it."""
    found = {}
    for place in dict.fromkeys(place.name for place in plan.step.places()):
        arms = [BASE, *(name for name, places in swapped.items() if place in places)]
        asked = {"place": place, "arms": arms, "samples": ALONE_SAMPLES, "at_least": ALONE_S}
        try:
            found[place] = {name: 1e3 * of for name, of in worker.ask("alone", CALL_S, **asked).items()}
        except WorkerFailure as failure:
            notes.append(f"{place} could not be timed alone: {failure.reason}")
            return {}
    return found


def _times(
    step: ReplayStep, name: str, difference: Numbers, rounds: Rounds, alone: Mapping[str, Numbers]
) -> dict[str, Any]:
    """The times of an arm that has not failed, as fields of ReplayArm."""
    times: dict[str, Any] = {"step": _timed(rounds, name), "difference": difference}
    times["places_alone"] = {place: of[name] for place, of in alone.items() if name in of}
    change = _timed(rounds, name, BASE)
    if name != BASE and change is not None:
        times["change"] = change
        if alone:
            times["alone"] = sum(alone[place][name] - alone[place][BASE] for place in difference)
        counts = [step.calls(place) for place in difference]
        replayed, whole = sum(here for here, _ in counts), sum(there for _, there in counts)
        if replayed != whole:
            ends = [None if ms is None else ms * whole / replayed for ms in (change.low, change.high)]
            times["whole"] = Timed(ms=change.ms * whole / replayed, low=ends[0], high=ends[1])
    return times


def _timed(rounds: Rounds, name: str, less: str = "") -> Timed | None:
    pairs = [
        (r.block, 1e3 * (r.seconds[name] - (r.seconds[less] if less else 0.0)))
        for r in rounds.rounds
        if name in r.seconds and (not less or less in r.seconds)
    ]
    if not pairs:
        return None
    over, known = interval(pairs, CONFIDENCE), len({block for block, _ in pairs}) > 1
    return Timed(ms=over.mean, low=over.low if known else None, high=over.high if known else None)
