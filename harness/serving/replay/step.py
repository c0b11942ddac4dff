"""The decode step of a rank: its layers, the requests in it, and the calls of a layer. No torch.

The order is that of DeepSeek-V3 in vLLM 0.32 (model_executor/models/deepseek_v2.py and
layers/attention/mla_attention.py), with absorbed MLA. The all-reduces of a tensor-parallel rank are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.files import read_toml
from shapes.attention import Parallel
from shapes.experts import fused_moe_sizes
from shapes.linears import Linear, linears
from shapes.models import ModelConfig

GEMM, MOE, MLA = "block_scale_gemm", "fused_moe", "mla_decode"
OPS = (GEMM, MOE, MLA)  # op classes that are ops of the suite; places of the others are glue

PARTS: dict[str, dict[str, str]] = read_toml(Path(__file__).with_name("places.toml"))
"""The op class of each place of a part of the step: `first`, `attention`, `dense_mlp`, `moe_mlp`, `last`."""
OP_CLASS = {place: op_class for part in PARTS.values() for place, op_class in part.items()}


@dataclass(frozen=True)
class StepPlace:
    """A place of a step, at which one call is made. layer: its number in the replayed rank"""

    layer: int
    name: str

    @property
    def op(self) -> str:
        """The op of the suite; empty for glue."""
        op_class = OP_CLASS[self.name]
        return op_class if op_class in OPS else ""

    @property
    def key(self) -> str:
        return f"{self.layer}.{self.name}"

    def implementation(self, chosen: dict[str, str]) -> str:
        """The implementation by a choice from `op` or `op:place` to implementation."""
        return chosen.get(f"{self.op}:{self.name}") or chosen[self.op]


@dataclass(frozen=True)
class ReplayStep:
    """A step in which each of `batch` requests has `ctx` tokens in its cache, its one new token included.

    dense, moe: layers of each kind that are replayed
    page, kv:   of the cache, as in `mla_decode`
    routing:    a pattern of shapes.routing
    """

    model: ModelConfig
    parallel: Parallel
    batch: int
    ctx: int
    dense: int
    moe: int
    page: int = 64
    kv: str = "bf16"
    routing: str = "balanced"

    def __post_init__(self) -> None:
        if min(self.batch, self.ctx, self.layers) < 1 or min(self.dense, self.moe) < 0:
            raise ValueError("a step has at least one request, one token of context and one layer")

    @property
    def layers(self) -> int:
        return self.dense + self.moe

    @property
    def heads(self) -> int:
        return self.parallel.heads(self.model)

    @property
    def all_reduces(self) -> list[str]:
        """What the replay leaves out of a tensor-parallel step, in words; empty for one GPU."""
        tp = self.parallel.tp
        return [f"{2 * self.layers} all-reduces of TP{tp}"] if tp > 1 else []

    def linear(self, name: str) -> Linear:
        return next(linear for linear in linears(self.model, self.parallel) if linear.name == name)

    def sizes(self, place: StepPlace) -> dict[str, Any]:
        """The sizes of a place that one of the suite's ops fills."""
        model = self.model
        if place.op == GEMM:
            linear = self.linear(place.name)
            return {"m": self.batch, "n": linear.n, "k": linear.k}
        if place.op == MLA:
            ctx = f"{self.ctx}..{self.ctx}"
            return {"batch": self.batch, "heads": self.heads, "ctx": ctx, "page": self.page, "kv": self.kv}
        return fused_moe_sizes(model, self.parallel, self.batch, routing=self.routing)

    def places(self) -> list[StepPlace]:
        """The calls of the step, in the order in which they are made."""
        parts = [(0, "first")]
        for layer in range(self.layers):
            parts += [(layer, "attention"), (layer, "dense_mlp" if layer < self.dense else "moe_mlp")]
        parts.append((self.layers, "last"))
        return [StepPlace(layer, name) for layer, part in parts for name in PARTS[part]]

    def op_places(self) -> list[StepPlace]:
        return [place for place in self.places() if place.op]

    def calls(self, name: str) -> tuple[int, int]:
        """The number of calls of a layer's place in the replayed step, and in a step of the whole model."""
        dense, layers = self.model.first_k_dense_replace, self.model.num_hidden_layers
        if name in PARTS["dense_mlp"]:
            return self.dense, dense
        if name in PARTS["moe_mlp"]:
            return self.moe, layers - dense
        return self.layers, layers
