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
    """One choice of implementations. Older records also have times of calls that the host timed one by one
    (`own`, `warm`). They are not read: on a GPU they tell nothing of the step.

    chosen:       from `op` or `op:place` to implementation
    change:       the step less the base's step, from paired rounds; None for the base
    whole:        `change` for the model's full number of layers, if fewer were replayed
    alone:        what the swapped calls change without the rest of the step; `cold` in older records
    places_alone: milliseconds of the calls of a place in all layers, made one after another without the rest
                  of the step. The base has all places, another arm those that it swaps
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
        is_opposite_alone = (self.alone or 0.0) * self.change.ms < 0
        word = "no change seen"
        if high < 0:
            word = "slower alone, faster in the step" if is_opposite_alone else "faster"
        elif low > 0:
            word = "faster alone, slower in the step" if is_opposite_alone else "slower"
        return f"{word}; outputs {max(self.difference.values(), default=0.0):.1e} apart"


class Replay(StrictRecord):
    """The record of a replay.

    step:      the fields of ReplayStep, with the model's name
    base:      the arm that the others are compared with
    twin:      the base less itself, prepared a second time: what is measured where nothing changes
    disturbed: rounds that were left out because something else ran
    stopped:   why measuring ended
    left_out:  what a served step does beside the replayed calls
    samples:   a round each: `block`, `round`, and the seconds of a step by arm
    """

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
        rows = []
        for name, arm in self.arms.items():
            row = {"arm": name, "change ms": arm.change.text() if arm.change else ""}
            row["verdict"] = arm.verdict()
            row["step ms"] = arm.step.text(".4g") if arm.step else ""
            row["alone ms"] = "" if arm.alone is None else f"{arm.alone:+.4g}"
            row["whole model ms"] = arm.whole.text() if arm.whole else ""
            rows.append(row)
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
        return Group(
            what, "", table_of(rows), "", printed_notes([(label, text) for label, text in notes if text])
        )


RANK = "harness.serving.replay.child:Rank"
PREPARE_S, CALL_S = 900.0, 120.0  # the most that a request to the worker takes: to prepare, and any other
BLOCKS, ROUNDS = 6, 12  # the most blocks, and the most rounds in each
SAMPLE_S = 0.25  # the least seconds of a sample
ALONE_S, ALONE_SAMPLES = 0.05, 7  # the least seconds and the number of samples of a place's calls alone
BASE, RERUN = "base", "base again"
ALIKE = 0.05  # the most by which two right outputs differ, relative: FP8 activations give 0.04
SHARE = 0.92  # of memory: nothing else is on the device, and no further sets of operands rotate

Arms = dict[str, dict[str, str]]  # from name to `op` or `op:place` to implementation; BASE is among the names
Alone = dict[str, dict[str, float]]  # by place and arm, the ms that calls of the place take alone


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
    """One plan for each batch size, with an arm for each `swap`, from the options of `serving replay` as the
    user writes them. Raises UsageError or NothingRan."""
    budget_s = parse_seconds(budget, "--budget")
    try:
        config = named_model(model)
        reasons = list(config.inapplicable.values())
        reasons += [f"its {name} is in bf16" for name in config.parts if name in config.unquantised]
        reasons += [] if config.q_lora_rank else ["its queries have no latent"]
        if reasons:
            raise UsageError(f"{config.name} cannot be replayed: {reasons[0]}")
        if not re.fullmatch(r"\d+(,\d+)*", batch):
            raise UsageError(f"--batch takes numbers, not {batch!r}")
        sizes = _cache_and_routing(platform, case)
        dense = config.first_k_dense_replace
        moe = config.num_hidden_layers - dense
        for requests in map(int, batch.split(",")):
            whole = ReplayStep(config, Parallel(tp=tp), requests, ctx, dense, moe, **sizes)
            for place in whole.op_places():
                kernels.OPS[place.op].sizes(whole.sizes(place))  # raises ValueError for impossible ones
            arms = read_arms(whole, platform, base, swap)
            step = with_layers(whole, layers) if layers else fitted(whole, arms, platform)
            replayed = f"{step.dense} of {dense} dense and {step.moe} of {moe} MoE layers"
            note = f"{replayed} were replayed; `whole model` is the change times the number of swapped calls"
            yield ReplayPlan(step, arms, budget_s, [note] if step != whole else [])
    except ValueError as error:
        raise UsageError(str(error)) from None


def _cache_and_routing(platform: Platform, case: str | None) -> dict[str, Any]:
    """Page size, dtype of the cache and routing, as fields of ReplayStep. Raises UsageError."""
    sizes = {"page": "16" if platform.kind == "cpu" else "64", "kv": "bf16", "routing": "balanced"}
    given = parse(case) if case else [{}]
    merged = sizes | given[0]
    if len(given) > 1 or merged.keys() != sizes.keys() or not merged["page"].isdecimal():
        raise UsageError(f"--case takes one page=NUMBER, kv=DTYPE, routing=NAME each, not {case!r}")
    return {**merged, "page": int(merged["page"])}


def read_arms(step: ReplayStep, platform: Platform, base: Sequence[str], swap: Sequence[str]) -> Arms:
    """The base, as changed by texts `op=impl`, and an arm for each text of `swap`; a text may have several
    `op=impl` between commas. Raises UsageError if one names an unknown op, place or implementation, or is the
    base by another name, and NothingRan if no swap can run here."""
    places = step.op_places()
    chosen = {}
    for op in sorted({place.op for place in places}):
        engine_like = "" if platform.kind == "cpu" else kernels.OPS[op].engine_like
        chosen[op] = engine_like or kernels.OPS[op].baseline[platform.kind]
    chosen |= _choices(places, ",".join(base), "--base")
    arms = {BASE: chosen}
    swaps = {text: _choices(places, text, "--swap") for text in swap}
    for text, swapped in swaps.items():
        arms[text] = chosen | swapped
        if all(place.implementation(arms[text]) == place.implementation(chosen) for place in places):
            runs = ", ".join(f"{op}={name}" for op, name in chosen.items())
            raise UsageError(f"--swap {text!r} is what the base runs; the base: {runs}")
    reasons = [_lacking(swapped, platform) for swapped in swaps.values()]
    if reasons and all(reasons):
        raise NothingRan("; ".join(dict.fromkeys(reasons)))
    return arms


def _lacking(choices: Mapping[str, str], platform: Platform) -> str:
    """The first row that cannot run here, with the reason; empty if all can."""
    for key, name in choices.items():
        op = key.partition(":")[0]
        for row in kernels.implementations(op):
            if row.name == name and not (support := row.available(platform)).ok:
                return f"{row.name} {support.reason}"
    return ""


def _choices(places: Sequence[StepPlace], texts: str, option: str) -> dict[str, str]:
    """What an option chooses, as in Arms: `op=impl` or `op:place=impl` between commas. Raises UsageError."""
    known = {place.op for place in places} | {f"{place.op}:{place.name}" for place in places}
    choices = {}
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


def with_layers(whole: ReplayStep, layers: str) -> ReplayStep:
    """The step with as many layers as `DENSE,MOE` says. Raises UsageError."""
    if not re.fullmatch(r"\d+,\d+", layers):
        raise UsageError(f"--layers takes DENSE,MOE, two numbers such as 1,4, not {layers!r}")
    dense, moe = map(int, layers.split(","))
    if dense > whole.dense or moe > whole.moe:
        raise UsageError(f"--layers {layers}: the model has {whole.dense} dense and {whole.moe} MoE layers")
    try:
        return replace(whole, dense=dense, moe=moe)
    except ValueError as error:
        raise UsageError(f"--layers takes DENSE,MOE, not {layers!r}: {error}") from None


def fitted(step: ReplayStep, arms: Arms, platform: Platform) -> ReplayStep:
    """The step with as many MoE layers as the device holds for all arms. Raises NothingRan if none fits."""
    memory = free_memory(platform)
    if memory is None:
        return step
    room = SHARE * memory
    while step.moe > 1 and needed(step, arms) > room:
        step = replace(step, moe=step.moe - 1)
    if needed(step, arms) > room:
        larger = [tp for tp in (2, 4, 8, 16) if tp > step.parallel.tp]
        fitting = [tp for tp in larger if needed(replace(step, parallel=Parallel(tp=tp)), arms) <= room]
        advice = f"--tp {fitting[0]} fits" if fitting else "take fewer --layers or --swap, a smaller --batch"
        raise NothingRan(
            f"a step of {step.dense} dense and {step.moe} MoE layers of --tp {step.parallel.tp} takes "
            f"{needed(step, arms) / 2**30:.1f} GiB, and {memory / 2**30:.1f} GiB are free: {advice}"
        )
    return step


def needed(step: ReplayStep, arms: Arms) -> float:
    """Bytes of operands, outputs and the layouts of each arm. Workspaces are small beside them."""
    total = 2.0 * step.linear("lm_head").n * step.model.hidden_size  # bf16
    # Places that differ only in their layer have the same sizes.
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
    with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
        environment, log = thread_environment(platform, threads), Path(scratch) / "replay.log"
        worker = WorkerProcess(RANK, environment, log, plugins=[str(path) for path in kernels.plugin_files()])
        try:
            worker.hello(platform, threads, PREPARE_S)
            rounds, failed = _measured(plan, launch, worker, monitor)
            differences = {}  # of arms with right outputs: by arm, then by swapped place
            for name in [name for name in plan.arms if name not in failed]:
                chosen = plan.arms[name]
                by_place = worker.ask("difference", CALL_S, base=plan.arms[BASE], chosen=chosen)
                # NaN is wrong, too.
                if wrong := {place: off for place, off in by_place.items() if not off <= ALIKE}:
                    reason = f"wrong: its outputs differ from the base's: {wrong}"
                    failed[name] = ReplayArm(chosen=chosen, failed=reason)
                else:
                    differences[name] = by_place
            alone, notes = _alone(plan, differences, worker)
        except WorkerFailure as failure:
            raise NothingRan(f"the step could not be replayed: {failure.reason}") from None
        finally:
            worker.kill()
    arms = {}
    for name in plan.arms:
        arms[name] = failed.get(name) or _timed_arm(plan, name, differences[name], rounds, alone)
    return Replay(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=tuple(map(portable, sys.argv[1:])), step=asdict(plan.step) | {"model": plan.step.model.name},
        launch=launch, threads=threads, base=BASE, arms=arms, twin=_timed(rounds, RERUN, BASE),
        rounds=len(rounds.rounds), disturbed=len(rounds.left_out), stopped=rounds.stopped,
        left_out=(*plan.step.all_reduces, "scheduler", "HTTP", "rank skew"),
        notes=(*plan.notes, *notes),
        samples=tuple({"block": r.block, "round": r.index, **r.seconds} for r in rounds.rounds),
        provenance=provenance(platform, threads),
    )  # fmt: skip


def _measured(
    plan: ReplayPlan, launch: str, worker: WorkerProcess, monitor: Monitor
) -> tuple[Rounds, dict[str, ReplayArm]]:
    """The rounds of the arms and of the base again; and the arms that failed."""
    arms = plan.arms | {RERUN: plan.arms[BASE]}
    failures: dict[str, WorkerFailure] = {}  # of preparing, by arm

    def begin(block: int, contenders: Collection[str]) -> None:
        print(f"block {block + 1} of up to {BLOCKS}: {len(contenders)} arms", file=sys.stderr)
        worker.ask("open", PREPARE_S, step=plan.step, seed=block, launch=launch)
        for name in [name for name in arms if name in contenders]:
            try:
                worker.ask("prepare", PREPARE_S, arm=name, chosen=arms[name])
            except WorkerFailure as failure:
                if failure.fatal or name == BASE:
                    raise
                failures[name] = failure

    def sample_s(name: str) -> float:
        if name in failures:
            raise RuntimeError(failures[name].reason)
        with monitor.watching(name):
            return worker.ask("sample", CALL_S, arm=name, at_least=SAMPLE_S)

    policy = Policy(
        blocks=BLOCKS, first_rounds=min(4, ROUNDS), max_rounds=ROUNDS, half_width=0.0, baseline=BASE,
        rerun=RERUN, budget_s=plan.budget_s, begin_block=begin, begin_round=monitor.begin,
        end_round=monitor.end,
    )  # fmt: skip
    rounds = measure({name: partial(sample_s, name) for name in arms}, policy)
    reasons = {name: failure.reason for name, failure in failures.items()} | rounds.dropped
    failed = {}
    for name, reason in reasons.items():
        unsupported = name in failures and failures[name].status == "unsupported"
        failed[name] = ReplayArm(chosen=arms[name], failed=reason, unsupported=unsupported)
    return rounds, failed


def _alone(
    plan: ReplayPlan, swapped: Mapping[str, Collection[str]], worker: WorkerProcess
) -> tuple[Alone, list[str]]:
    """The times of the base and of arms that swap a place, and notes. If one cannot be timed there are no
    times, and a note says why. swapped: the places of each arm"""
    by_place = {}
    for place in dict.fromkeys(place.name for place in plan.step.places()):
        arms = [BASE, *(name for name, places in swapped.items() if place in places)]
        arguments = {"place": place, "arms": arms, "samples": ALONE_SAMPLES, "at_least": ALONE_S}
        try:
            seconds = worker.ask("alone", CALL_S, **arguments)
            by_place[place] = {name: 1e3 * seconds[name] for name in arms}
        except WorkerFailure as failure:
            return {}, [f"{place} could not be timed alone: {failure.reason}"]
    return by_place, []


def _timed_arm(
    plan: ReplayPlan, name: str, difference: Mapping[str, float], rounds: Rounds, alone: Alone
) -> ReplayArm:
    """An arm that has not failed, with its times. difference: of its swapped places"""
    times: dict[str, Any] = {"step": _timed(rounds, name), "difference": difference}
    times["places_alone"] = {place: by_arm[name] for place, by_arm in alone.items() if name in by_arm}
    change = _timed(rounds, name, BASE)
    if name != BASE and change is not None:
        times["change"] = change
        if alone:
            times["alone"] = sum(alone[place][name] - alone[place][BASE] for place in difference)
        calls = [plan.step.calls(place) for place in difference]  # the replayed step's, the whole model's
        replayed, whole = sum(count for count, _ in calls), sum(count for _, count in calls)
        if replayed != whole:
            factor = whole / replayed
            low = None if change.low is None else factor * change.low
            high = None if change.high is None else factor * change.high
            times["whole"] = Timed(ms=factor * change.ms, low=low, high=high)
    return ReplayArm(chosen=plan.arms[name], **times)


def _timed(rounds: Rounds, name: str, less: str = "") -> Timed | None:
    """The step of an arm, or what it takes longer than that of the arm `less`; None without such rounds."""
    pairs = []  # of each round: block, ms
    for measured in rounds.rounds:
        seconds = measured.seconds
        if name in seconds and (not less or less in seconds):
            subtracted = seconds[less] if less else 0.0
            pairs.append((measured.block, 1e3 * (seconds[name] - subtracted)))
    if not pairs:
        return None
    over_blocks = interval(pairs, CONFIDENCE)
    if len({block for block, _ in pairs}) == 1:
        return Timed(ms=over_blocks.mean)
    return Timed(ms=over_blocks.mean, low=over_blocks.low, high=over_blocks.high)
