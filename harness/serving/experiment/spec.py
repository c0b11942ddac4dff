"""Specification of an experiment: its TOML file, held to a schema, mistakes said in one line each."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

import kernels
from harness.errors import UsageError, mistake
from harness.serving.live.swaps import LEFT_ALONE, current_names, implementations, is_swap, known_swaps
from harness.serving.op_classes import OP_CLASSES
from harness.serving.replay.step import called_ops
from harness.serving.schema import StrictRecord

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = Path(__file__).with_name("specs")
NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}")
Method = Literal["replay", "isolated-cold", "isolated-warm", "serving-mode"]
Quantity = Literal["itl", "ttft", "tpot"]

METHODS: tuple[Method, ...] = ("replay", "isolated-cold", "isolated-warm", "serving-mode")
QUANTITIES: tuple[Quantity, ...] = ("itl", "ttft", "tpot")


class EngineSettings(StrictRecord):
    """kind, client: as `serving run` has them; flags and environment are all arms' alike
    model:   `default`, the generated one, or a directory
    kernels: names that the base's trace must have: the kernels that `replay.base` stands for
    """

    kind: str = "vllm"
    client: str = "vllm"
    model: str = "default"
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    start_timeout_s: float = Field(default=600.0, gt=0)
    run_timeout_s: float = Field(default=600.0, gt=0)


class LoadSettings(StrictRecord):
    """Tokens of each request, requests, and mirrored pairs of runs; pair i sends the prompts of seed + i.

    slice_s: both runs of a pair at the same time, their engines in turn for so long (engines on the CPU
             only); 0: one run after the other
    renew:   after so many pairs both servers are started anew; 0: never
    """

    input_len: int = Field(default=512, gt=0)
    output_len: int = Field(default=96, gt=1)
    prompts: int = Field(default=4, gt=0)
    concurrency: int = Field(default=4, gt=0)
    pairs: int = Field(default=8, ge=2)
    seed: int = Field(default=1, ge=0)
    slice_s: float = Field(default=0.0, ge=0, le=10)
    renew: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _enough_prompts(self) -> LoadSettings:
        if self.prompts < self.concurrency:
            raise ValueError(f"{self.prompts} prompts are never {self.concurrency} at once")
        return self


class RejectionSettings(StrictRecord):
    """Why a run does not count, the same for all arms.

    prefill_pattern: how requests must have been prefilled together; empty: as most of the base's first runs
    disturbed:       whether a run that other processes disturbed is rejected
    least_steady:    fewest inter-token times of the full batch
    """

    prefill_pattern: tuple[int, ...] = ()
    disturbed: bool = True
    least_steady: int = Field(default=24, gt=0)


class ReplaySettings(StrictRecord):
    """How steps are rebuilt.

    base:     op -> the implementation that stands for what the engine runs
    device:   as `serving replay` has it; empty: the first GPU, else the CPU
    threads:  as the engine has them
    routings: recorded decode steps whose routing is replayed
    budget_s: the most that a replayed decode step is measured
    blocks:   of it, each on operands made anew, of so many `rounds` at most
    prefill_blocks, prefill_rounds: likewise of a replayed prefill, which no budget ends
    """

    base: dict[str, str]
    device: str = ""
    launch: Literal["", "graph", "eager"] = ""
    threads: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    page: int = Field(default=16, gt=0)
    routings: int = Field(default=3, gt=0)
    budget_s: float = Field(default=30.0, gt=0)
    blocks: int = Field(default=2, ge=2)
    rounds: int = Field(default=12, gt=0)
    prefill_blocks: int = Field(default=3, ge=2)
    prefill_rounds: int = Field(default=1, gt=0)


class Predict(StrictRecord):
    """methods: what is written to the ledger beside each other
    serving_budget_s: measuring, for each case of the suite's own runs in the cache mode `serving`
    serving_phases:   whose kernels they measure; a quantity that needs another phase has no such prediction
    """

    methods: tuple[Method, ...] = METHODS
    quantities: tuple[Quantity, ...] = QUANTITIES
    serving_budget_s: float = Field(default=8.0, gt=0)
    serving_phases: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")


class Thresholds(StrictRecord):
    """resolved: part of the value before, below which a change is not told from none
    miss:       part of the observed change that a replay may be off before the ledger explains it
    """

    resolved: float = Field(default=0.03, ge=0, lt=1)
    miss: float = Field(default=0.15, gt=0, lt=1)


class Swap(StrictRecord):
    """One op replaced.

    op:     its class
    swap:   `OP[:PLACE]=IMPLEMENTATION`, what the engine is made to call (live/swaps.py)
    environment, flags: what the arm's engine has besides
    replay: `op` or `op:place` -> the implementation that stands for the swapped kernel; empty: those of
            `swap`, which are the same code
    glue:   what else changes with it in the engine, and is not replayed; empty: nothing
    """

    name: str
    op: str
    swap: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    flags: tuple[str, ...] = ()
    replay: dict[str, str] = Field(default_factory=dict)
    glue: str = ""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not NAME.fullmatch(name) or name == "base":
            raise ValueError("takes letters, digits and _ . + -, and not `base`")
        return name

    @field_validator("op")
    @classmethod
    def _known(cls, op: str) -> str:
        if op not in OP_CLASSES:
            raise ValueError(f"takes one of {', '.join(OP_CLASSES)}")
        return op

    @field_validator("swap")
    @classmethod
    def _current(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return current_names(names)

    @model_validator(mode="after")
    def _swaps_something(self) -> Swap:
        if not (self.swap or self.environment or self.flags):
            raise ValueError("says nothing that differs from the base: give swap, environment or flags")
        if not self.replay and not implementations(self.swap):
            raise ValueError("names no implementation to replay: give swap or replay")
        return self

    def replayed(self, base: Mapping[str, str]) -> dict[str, str]:
        """What stands for it in a replay. base: what stands for the engine's own kernels"""
        if self.replay:
            return self.replay
        chosen = implementations(self.swap)
        if "block_scale_gemm" in chosen:
            chosen[LEFT_ALONE] = base.get(LEFT_ALONE) or base["block_scale_gemm"]
        return chosen


class Experiment(StrictRecord):
    """name: its folder's and its rows'; about: a line for the reader"""

    name: str
    about: str = ""
    engine: EngineSettings = EngineSettings()
    load: LoadSettings = LoadSettings()
    rules: RejectionSettings = RejectionSettings()
    replay: ReplaySettings
    predict: Predict = Predict()
    thresholds: Thresholds = Thresholds()
    swaps: tuple[Swap, ...] = Field(min_length=1)

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError("takes letters, digits and _ . + -")
        return name

    @model_validator(mode="after")
    def _one_of_each_name(self) -> Experiment:
        names = [swap.name for swap in self.swaps]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two swaps are called {twice[0]}")
        return self

    def resolved(self) -> Experiment:
        """With what each swap's replay runs said in full."""
        swaps = (s.model_copy(update={"replay": s.replayed(self.replay.base)}) for s in self.swaps)
        return self.model_copy(update={"swaps": tuple(swaps)})

    def with_pairs(self, pairs: int) -> Experiment:
        return self.model_copy(update={"load": self.load.model_copy(update={"pairs": pairs})})

    def swap(self, name: str) -> Swap:
        """Raises UsageError."""
        for swap in self.swaps:
            if swap.name == name:
                return swap
        known = ", ".join(swap.name for swap in self.swaps)
        raise UsageError(f"no swap {name!r} in experiment {self.name}; swaps: {known}")


def read_experiment(name: str) -> Experiment:
    """An experiment's TOML, the experiment.json of one that was begun, or by its bare name one that the
    harness has. Raises UsageError."""
    path = Path(name)
    if not path.exists() and (FILES / f"{name}.toml").exists():
        path = FILES / f"{name}.toml"
    try:
        text = path.read_text()
    except OSError as error:
        own = ", ".join(sorted(path.stem for path in FILES.glob("*.toml")))
        raise UsageError(
            f"cannot read {name}: {error.strerror}; give a file, or one that the harness has: {own}"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {name}: no UTF-8 text") from None
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        document = parse(text)
    except ValueError as error:
        raise UsageError(f"{name}: no {kind}: {error}") from None
    try:
        experiment = Experiment(**document)
    except ValidationError as error:
        raise UsageError(f"{name}: {mistake(error)}{_allowed(error)}") from None
    except TypeError as error:
        raise UsageError(f"{name}: {error}") from None
    _require_known(experiment, name)
    return experiment.resolved()


def _allowed(error: ValidationError) -> str:
    """What might stand where the first mistake is a key that there is not."""
    first = error.errors()[0]
    keys = _keys([str(part) for part in first["loc"][:-1]]) if first["type"] == "extra_forbidden" else ()
    return f"; allowed: {', '.join(keys)}" if keys else ""


def _keys(path: list[str]) -> list[str]:
    """Those of the table that a path leads to."""
    model: Any = Experiment
    for part in path:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        inner = [kind for kind in getattr(annotation, "__args__", ()) if hasattr(kind, "model_fields")]
        model = inner[0] if inner else annotation
    return list(model.model_fields)


def _require_known(experiment: Experiment, name: str) -> None:
    """Swaps, ops and implementations that there are."""
    for op in called_ops():
        if op not in experiment.replay.base:
            raise UsageError(f"{name}: replay.base.{op} is missing: what stands for the engine's own kernel")
    _require_implementations(experiment.replay.base, f"{name}: replay.base")
    for swap in experiment.swaps:
        for item in swap.swap:
            if not is_swap(item):
                known = ", ".join(known_swaps())
                raise UsageError(f"{name}: swaps.{swap.name}.swap: no {item!r}; swaps: {known}")
        _require_implementations(swap.replay, f"{name}: swaps.{swap.name}.replay")


def _require_implementations(chosen: Mapping[str, str], where: str) -> None:
    for key, implementation in chosen.items():
        op = key.partition(":")[0]
        if op not in kernels.OPS:
            raise UsageError(f"{where}: no op {op!r}; ops: {', '.join(kernels.OPS)}")
        known = [i.name for i in kernels.implementations(op)]
        if implementation not in known:
            raise UsageError(
                f"{where}.{key}: no implementation {implementation!r}; see: list impls --op {op}"
            )
