"""Step of a rank: its layers, the requests in it, and the calls that a layer makes. No torch.

The order is that of DeepSeek-V3 in vLLM (model_executor/models/deepseek_v2.py and
layers/attention/mla_attention.py of 0.32): absorbed MLA where the step decodes, kv_b and MHA where it
prefills. A tensor-parallel rank's all-reduces are left out, and named so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shapes.attention import Parallel
from shapes.linears import Linear, linears
from shapes.models import ModelConfig

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True)
class StepPlace:
    """One call of a step. layer: its number in the replayed rank; op: the suite's, or empty for glue."""

    layer: int
    name: str
    op_class: str
    op: str = ""

    @property
    def key(self) -> str:
        return f"{self.layer}.{self.name}"


@dataclass(frozen=True)
class ReplayStep:
    """phase:    `decode`: each request has one new token; `prefill`: `new` of them
    contexts: tokens of each request's cache, those of this step included
    new:      new tokens of each request, prefill only (decode: one each)
    dense, moe: layers of each kind that are replayed
    page, kv: of the cache, as `mla_decode` has them
    routing:  a pattern of shapes.routing, or recorded ids [layer][token][pick] in `picks`
    """

    model: ModelConfig
    parallel: Parallel
    phase: Phase
    contexts: tuple[int, ...]
    new: tuple[int, ...] = ()
    dense: int = 0
    moe: int = 1
    page: int = 64
    kv: str = "bf16"
    routing: str = "balanced"
    picks: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError("a step has at least one request, of at least one token")
        if self.phase == "prefill" and (
            len(self.new) != len(self.contexts)
            or any(not 0 < n <= c for n, c in zip(self.new, self.contexts, strict=True))
        ):
            raise ValueError("a prefill step says the new tokens of each request, at most its context")
        if self.dense + self.moe < 1:
            raise ValueError("a step has at least one layer")
        if self.picks and (len(self.picks) != self.moe or any(len(p) != self.tokens for p in self.picks)):
            raise ValueError(f"recorded routing must have {self.moe} layers of {self.tokens} tokens")

    @property
    def tokens(self) -> int:
        return len(self.contexts) if self.phase == "decode" else sum(self.new)

    @property
    def layers(self) -> int:
        return self.dense + self.moe

    @property
    def heads(self) -> int:
        return self.parallel.heads(self.model)

    def linear(self, name: str) -> Linear:
        return next(linear for linear in linears(self.model, self.parallel) if linear.name == name)

    def sizes(self, place: StepPlace) -> dict[str, Any]:
        """Of a place that one of the suite's ops fills."""
        model = self.model
        if place.op == "block_scale_gemm":
            linear = self.linear(place.name)
            return {"m": self.tokens, "n": linear.n, "k": linear.k}
        if place.op == "fused_moe":
            return {
                "tokens": self.tokens,
                "experts": model.n_routed_experts,
                "topk": model.num_experts_per_tok,
                "hidden": model.hidden_size,
                "inter": model.moe_intermediate_size // self.parallel.tp,
                "routing": self.routing,
            }
        if place.op == "mla_decode":
            span = f"{min(self.contexts)}..{max(self.contexts)}"
            return {
                "batch": len(self.contexts),
                "ctx": span,
                "heads": self.heads,
                "page": self.page,
                "kv": self.kv,
            }
        return {"batch": len(self.new), "new": _span(self.new), "prefix": "0", "heads": self.heads}


def _span(values: tuple[int, ...]) -> str:
    return f"{min(values)}..{max(values)}" if min(values) < max(values) else str(values[0])


def places(step: ReplayStep) -> list[StepPlace]:
    """The calls of the step, in the order in which they are made."""
    step_places = [StepPlace(0, "embedding", "copy")]
    for layer in range(step.layers):
        step_places += [StepPlace(layer, *place) for place in _attention(step.phase)]
        step_places += [StepPlace(layer, *place) for place in (_DENSE if layer < step.dense else _MOE)]
    last = step.layers
    head = [("final norm", "norm"), ("lm_head", "bf16_gemm"), ("sampling", "sampling")]
    return [*step_places, *(StepPlace(last, *place) for place in head)]


def _attention(phase: Phase) -> list[tuple[str, ...]]:
    gemm = ("block_scale_gemm", "block_scale_gemm")
    before = [("input norm", "norm"), ("qkv_a", *gemm), ("latent norms", "norm"), ("q_b", *gemm)]
    if phase == "decode":
        between = [
            ("rope and KV write", "rope_kv"),
            ("w_uk", "absorbed_bmm"),
            ("q together", "copy"),
            ("mla_decode", "mla_decode", "mla_decode"),
            ("w_uv", "absorbed_bmm"),
        ]
    else:
        between = [
            ("rope and KV write", "rope_kv"),
            ("kv_b", *gemm),
            ("q, k, v together", "copy"),
            ("mha_prefill", "mha_prefill", "mha_prefill"),
        ]
    return [*before, *between, ("o_proj", *gemm), ("post-attention norm", "norm")]


_GEMM = ("block_scale_gemm", "block_scale_gemm")
_DENSE = [("dense gate_up", *_GEMM), ("dense SiLU", "activation"), ("dense down", *_GEMM)]
_MOE = [
    ("router", "bf16_gemm"),
    ("top-k", "moe_routing"),
    ("shared gate_up", *_GEMM),
    ("shared SiLU", "activation"),
    ("shared down", *_GEMM),
    ("fused_moe", "fused_moe", "fused_moe"),
    ("sum with shared", "elementwise"),
]


def called_ops() -> list[str]:
    """Those of the suite that a step calls, of either phase."""
    made = [*_attention("prefill"), *_attention("decode"), *_DENSE, *_MOE]
    return sorted({op for _, _, *known in made for op in known})


def calls(step: ReplayStep, op: str, part: str = "") -> tuple[int, int]:
    """Calls of an op (of its places called `part`) in the replayed step, and in one of the whole model."""
    replayed = [p for p in places(step) if p.op == op and part in ("", p.name)]
    whole = 0.0
    for place in replayed:
        kind = place.name
        if kind.startswith("dense"):
            scale = step.model.first_k_dense_replace / step.dense
        elif kind.startswith("shared") or place.op == "fused_moe":
            scale = (step.model.num_hidden_layers - step.model.first_k_dense_replace) / step.moe
        else:
            scale = step.model.num_hidden_layers / step.layers
        whole += scale
    return len(replayed), round(whole)
