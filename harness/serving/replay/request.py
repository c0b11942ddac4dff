"""The request for a replay: options of `serving replay` as given, and the steps and arms that they mean."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import kernels
from harness.errors import UsageError
from harness.machine.cpu_threads import default_threads
from harness.plan.budget import parse_seconds
from harness.plan.select import launches
from harness.serving.replay.memory import fitted
from harness.serving.replay.replay import BASE, ReplayPlan, require_known
from harness.serving.replay.step import Phase, ReplayStep, called_ops
from kernels.op import Op
from kernels.platform import Platform
from shapes.attention import Parallel
from shapes.models import ModelConfig, model, read_model


@dataclass(frozen=True)
class ReplayRequest:
    """model: a name, or a folder with a config.json; batch: a step is replayed for each of its sizes
    ctx, new: tokens cached of each request (decode), new tokens of each (prefill); layers: `DENSE,MOE`
    base, swap: `OP=IMPL` and `OP:PLACE=IMPL` texts; each of `swap` is an arm
    """

    model: str = "deepseek-r1"
    tp: int = 1
    phase: Phase = "decode"
    batch: str = "4"
    ctx: str = "1024"
    new: str = "1024"
    layers: str | None = None
    base: Sequence[str] = ()
    swap: Sequence[str] = ()
    routing: str = "balanced"
    page: int | None = None
    kv: str = "bf16"
    device: str | None = None
    launch: str | None = None
    threads: int | None = None
    budget: str = "60s"
    blocks: int = 6
    seed: int = 0

    def plans(self, platform: Platform) -> Iterator[tuple[str, ReplayPlan, tuple[str, ...]]]:
        """A name, what is to be measured, and notes on it, for each batch size. Raises UsageError, NothingRan
        where memory holds no layer."""
        arms = read_arms(platform, self.base, self.swap)
        rank = read_rank(self.model)
        for size in numbers(self.batch, "--batch"):
            step = self.step(rank, size, platform)
            require_known(arms, step)
            step, notes = fitted(step, self.layers, arms, platform)
            plan = ReplayPlan(
                step,
                arms,
                launches(platform, self.launch)[0],
                self.threads or default_threads(),
                parse_seconds(self.budget, "--budget"),
                blocks=self.blocks,
                seed=self.seed,
            )
            yield f"{self.phase}-b{size}", plan, notes

    def step(self, rank: ModelConfig, batch: int, platform: Platform) -> ReplayStep:
        """A step of requests that are alike; its layers are the model's. Raises UsageError."""
        dense, prefill = rank.first_k_dense_replace, self.phase == "prefill"
        tokens = numbers(self.new, "--new")[0] if prefill else numbers(self.ctx, "--ctx")[0]
        try:
            return ReplayStep(
                rank,
                Parallel(tp=self.tp),
                self.phase,
                contexts=(tokens,) * batch,
                new=(tokens,) * batch if prefill else (),
                dense=dense,
                moe=rank.num_hidden_layers - dense,
                page=self.page or (16 if platform.kind == "cpu" else 64),
                kv=self.kv,
                routing=self.routing,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None


def read_arms(platform: Platform, base: Sequence[str], swap: Sequence[str]) -> dict[str, dict[str, str]]:
    """`op=impl` texts of the base; each swap, of one or more by commas, is an arm. Raises UsageError."""
    implementations = {name: _default(kernels.OPS[name], platform) for name in called_ops()}
    implementations |= dict(_choices(base, "--base"))
    return {BASE: implementations} | {
        text: implementations | dict(_choices([text], "--swap")) for text in swap
    }


def _default(op: Op, platform: Platform) -> str:
    return op.engine_like if op.engine_like and platform.kind != "cpu" else op.baseline[platform.kind]


def _choices(texts: Sequence[str], option: str) -> Iterator[tuple[str, str]]:
    for text in itertools.chain.from_iterable(items.split(",") for items in texts):
        key, equals, implementation = text.partition("=")
        if not (key and equals and implementation):
            raise UsageError(f"{option} takes OP=IMPL or OP:PLACE=IMPL, not {text!r}")
        yield key.strip(), implementation.strip()


def read_rank(name: str) -> ModelConfig:
    """A model by its name, or by a folder or file with its config.json. Raises UsageError."""
    try:
        return read_model(Path(name)) if Path(name).exists() else model(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def numbers(text: str, option: str) -> list[int]:
    """Positive whole numbers by commas. Raises UsageError."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} takes numbers, not {text!r}") from None
    if min(values) < 1:
        raise UsageError(f"{option} must be at least 1")
    return values
