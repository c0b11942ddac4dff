"""`python -m harness serving replay`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

import kernels
from harness.errors import FAILED, OK, NothingRan, UsageError
from harness.files import require_writable, write
from harness.machine.cpu_threads import default_threads
from harness.machine.device import choose_device
from harness.plan.budget import parse_seconds
from harness.run.device import own_device
from harness.serving.replay.memory import fitted
from harness.serving.replay.replay import BASE, Plan, replay, require_known
from harness.serving.replay.schema import Replay, Timed
from harness.serving.replay.step import Step, called_ops
from kernels.op import Op
from kernels.platform import Platform
from shapes.attention import Parallel
from shapes.models import ModelConfig, model, read_model


def show(
    model_name: str,
    tp: int,
    phase: str,
    batch: str,
    ctx: str,
    new: str,
    layers: str | None,
    base: Sequence[str],
    swap: Sequence[str],
    routing: str,
    page: int | None,
    kv: str,
    device: str | None,
    launch: str | None,
    threads: int | None,
    budget: str,
    blocks: int,
    seed: int,
    out: str | None,
    json_to: str | None,
) -> int:
    """Replays one step for each batch size and prints what each swap changes."""
    require_writable(json_to, None)
    platform = choose_device(device)
    arms = read_arms(platform, base, swap)
    rank = read_rank(model_name)
    found = []
    with own_device(platform) as own:
        for line in own.busy:
            print(f"note: {line}", file=sys.stderr)
        for size in _numbers(batch, "--batch"):
            step = read_step(rank, tp, phase, size, ctx, new, routing, page or _page(platform), kv)
            require_known(arms, step)
            step, note = fitted(step, layers, arms, platform)
            plan = Plan(
                step,
                arms,
                launch or ("eager" if platform.kind == "cpu" else "graph"),
                threads or default_threads(),
                parse_seconds(budget, "--budget"),
                blocks=blocks,
                seed=seed,
            )
            one = replay(plan, platform, own.monitor)
            one = one.model_copy(update={"notes": (*note, *one.notes)})
            found.append(one)
            print("\n" + table(one), file=sys.stderr if json_to == "-" else sys.stdout, flush=True)
            if out:
                keep(one, Path(out), f"{phase}-b{size}")
    if json_to:
        write(json_to, "[" + ",\n".join(one.model_dump_json(indent=1) for one in found) + "]\n")
    if unmeasured := [one for one in found if not one.rounds]:
        raise NothingRan(
            f"no round counted ({unmeasured[0].stopped}), {unmeasured[0].disturbed} were disturbed: give a "
            "longer --budget, or quiet the machine"
        )
    return FAILED if any(arm.failed for one in found for arm in one.arms.values()) else OK


def keep(one: Replay, folder: Path, name: str) -> Path:
    """Writes a replay into a folder; raises UsageError where that cannot be done."""
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(one.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return path


def read_arms(platform: Platform, base: Sequence[str], swap: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """`op=impl` texts of the base; each swap, of one or more by commas, is an arm."""
    chosen = {name: _default(kernels.OPS[name], platform) for name in called_ops()}
    chosen |= dict(_choices(base, "--base"))
    return {BASE: chosen} | {one: chosen | dict(_choices([one], "--swap")) for one in swap}


def _default(op: Op, platform: Platform) -> str:
    return op.engine_like if op.engine_like and platform.kind != "cpu" else op.baseline[platform.kind]


def _choices(texts: Sequence[str], option: str) -> Iterator[tuple[str, str]]:
    for text in itertools.chain.from_iterable(one.split(",") for one in texts):
        key, equals, implementation = text.partition("=")
        if not (key and equals and implementation):
            raise UsageError(f"{option} takes OP=IMPL or OP:PLACE=IMPL, not {text!r}")
        yield key.strip(), implementation.strip()


def read_rank(name: str) -> ModelConfig:
    """A model by its name, or by a folder or file with its config.json."""
    try:
        return read_model(Path(name)) if Path(name).exists() else model(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def read_step(
    rank: ModelConfig,
    tp: int,
    phase: str,
    batch: int,
    ctx: str,
    new: str,
    routing: str,
    page: int,
    kv: str,
) -> Step:
    """A step of requests that are alike; its layers are the model's."""
    dense = rank.first_k_dense_replace
    tokens = _numbers(ctx if phase == "decode" else new, "--ctx" if phase == "decode" else "--new")[0]
    try:
        return Step(
            rank,
            Parallel(tp=tp),
            phase,  # type: ignore[arg-type]
            (tokens,) * batch,
            (tokens,) * batch if phase == "prefill" else (),
            dense,
            rank.num_hidden_layers - dense,
            page,
            kv,
            routing,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _page(platform: Platform) -> int:
    return 16 if platform.kind == "cpu" else 64


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} takes numbers, not {text!r}") from None
    if min(found) < 1:
        raise UsageError(f"{option} must be at least 1")
    return found


def table(one: Replay) -> str:
    """The step, what each arm changes by each method, and where the base's time goes."""
    step, base = one.step, one.arms[one.base]
    layers = f"{step['dense']} dense and {step['moe']} MoE layers"
    head = (
        f"{step['phase']} step of {step['model']}, tp={step['parallel']['tp']}: "
        f"{len(step['contexts'])} requests, {step['tokens']} tokens, context {max(step['contexts'])}, "
        f"{layers}, routing {step['picks']}, "
        f"{one.launch}, {one.threads} threads"
    )
    rows = [
        [name, _timed(arm.step), _timed(arm.change, "+"), *(_ms(v) for v in (arm.own, arm.cold, arm.warm)),
         _timed(arm.whole, "+"), arm.failed or _alike(arm.difference)]
        for name, arm in one.arms.items()
    ]  # fmt: skip
    columns = ["arm", "step ms", "change", "own calls", "cold", "warm", "whole model", ""]
    lines = [head, tabulate(rows, columns, disable_numparse=True)]
    if one.twin:
        lines.append(f"the base against itself: {_timed(one.twin, '+')} ms")
    total = sum(base.classes.values()) or 1.0
    shares = sorted(base.classes.items(), key=lambda item: -item[1])
    lines.append(
        "base, each call waited for: " + ", ".join(f"{k} {v:.3g} ms ({v / total:.0%})" for k, v in shares)
    )
    lines.append(f"left out: {', '.join(one.left_out)}")
    lines += [f"note: {text}" for text in one.notes]
    lines.append(
        f"{one.rounds} rounds, {one.disturbed} more disturbed; change: of the whole step, from paired "
        "rounds, with a 90 % interval; own calls: of that, the swapped calls in their place; cold, warm: the "
        "same calls isolated"
    )
    return "\n".join(lines)


def _timed(one: Timed | None, sign: str = "") -> str:
    if one is None:
        return ""
    interval = f" ({one.low:{sign}.4g}..{one.high:{sign}.4g})" if one.low is not None else ""
    return f"{one.ms:{sign}.4g}{interval}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:+.4g}"


def _alike(difference: Mapping[str, Any]) -> str:
    return f"outputs {max(difference.values()):.1e} apart" if difference else ""


@click.command("replay")
@click.option("--model", "model_name", default="deepseek-r1", show_default=True, metavar="NAME|DIR",
              help="A model of `shapes`, or a folder with a config.json.")  # fmt: skip
@click.option(
    "--tp", type=click.IntRange(1), default=1, show_default=True, help="The rank is one of so many."
)
@click.option("--phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True)
@click.option("--batch", default="4", show_default=True, metavar="N[,N...]", help="Requests in the step.")
@click.option("--ctx", default="1024", show_default=True, help="Decode: tokens cached of each request.")
@click.option("--new", default="1024", show_default=True, help="Prefill: new tokens of each request.")
@click.option("--layers", metavar="DENSE,MOE", help="Replay so many (default: all, or what memory holds).")
@click.option("--base", multiple=True, metavar="OP=IMPL[,...]", help="What the engine runs.")
@click.option("--swap", multiple=True, metavar="OP[:PLACE]=IMPL", help="An arm: the base with this instead.")
@click.option("--routing", default="balanced", show_default=True, help="A pattern: balanced, zipf:0.8 ...")
@click.option("--page", type=click.IntRange(1), help="Tokens of a KV page (default: 16 on CPUs, else 64).")
@click.option("--kv", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option("--device", help="cpu, cuda, cuda:1 ... (default: the first GPU, else the CPU).")
@click.option("--launch", type=click.Choice(["graph", "eager"]), help="On GPUs (default: graph).")
@click.option("--threads", type=click.IntRange(1), help="CPU threads, as the engine has them.")
@click.option("--budget", default="60s", show_default=True, help="Time for measuring, set-up apart.")
@click.option(
    "--blocks", type=click.IntRange(2), default=6, show_default=True, help="Prepared anew so often."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", metavar="DIR", help="Keep the replay there, with every round.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there.")
def replay_command(**options: Any) -> None:
    """One step of one rank, rebuilt from the suite's implementations in the engine's order with weights for
    every layer; one op swapped at a time, all arms in interleaved rounds."""
    sys.exit(show(**options))
