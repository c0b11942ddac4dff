"""Activations of a step, and the glue that carries them from one place to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import kernels
from harness.serving.replay import glue
from harness.serving.replay.step import ReplayStep, StepPlace
from kernels.op import Prepared

if TYPE_CHECKING:
    import torch

    from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
    from kernels.mla_decode.operands import MlaDecodeOperands


Call = Callable[[], Any]

WRITTEN_IN_PLACE = ("q", "k", "v", "kv")
"""Live operands that glue writes straight into the layout which the bound call reads, as engines do."""


class Flow:
    """The activations of a step, and the glue that carries them from one place to the next."""

    def __init__(self, step: ReplayStep, device: str, seed: int) -> None:
        import torch

        self.step, self.device = step, device
        self.generator = torch.Generator(device).manual_seed(seed)
        model, tokens, heads = step.model, step.tokens, step.heads
        self.residual = self._normal(tokens, model.hidden_size)
        self.normed = self._empty(tokens, model.hidden_size)
        self.q_latent = self._empty(tokens, model.q_lora_rank)
        self.latent = self._empty(tokens, model.kv_lora_rank)
        self.attended = self._empty(tokens, heads * model.v_head_dim)
        self.bound: Mapping[str, Prepared] = {}
        self.weights: dict[tuple[int, str], Any] = {}
        self.logits = self._empty(1)
        self.cos, self.sin = glue.angles(self._positions())

    def _normal(self, *shape: int, size: float = 1.0) -> torch.Tensor:
        import torch

        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return values.normal_(0, size, generator=self.generator)

    def _empty(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=torch.bfloat16, device=self.device)

    def _positions(self) -> torch.Tensor:
        import torch

        step = self.step
        spans = zip(step.contexts, step.new or (1,) * len(step.contexts), strict=True)
        flat = [position for context, new in spans for position in range(context - new, context)]
        return torch.tensor(flat, device=self.device)

    def joined(self, place: StepPlace, operands: Any) -> Any:
        """The operands with the step's own buffers as their live inputs."""
        inputs = {"qkv_a": self.normed, "q_b": self.q_latent, "kv_b": self.latent, "o_proj": self.attended}
        inputs |= {"dense gate_up": self.normed, "shared gate_up": self.normed}
        if place.name in inputs:
            return operands.replaced(a=inputs[place.name])
        if place.op == "fused_moe":
            return operands.replaced(x=self.normed, topk_ids=self._recorded(place, operands))
        if place.op == "mla_decode":
            operands.kv.copy_(self._normal(*operands.kv.shape).to(operands.kv.dtype))
        return operands

    def output(self, place: StepPlace, operands: Any) -> torch.Tensor:
        """Where a call that allocates no output of its own writes it."""
        if place.op == "mha_prefill":
            return self.attended.view(-1, self.step.heads, self.step.model.v_head_dim)
        return kernels.OPS[place.op].empty_output(operands.sizes, self.device)

    def _recorded(self, place: StepPlace, operands: Any) -> Any:
        import torch

        if not self.step.picks:
            return operands.topk_ids
        picks = self.step.picks[place.layer - self.step.dense]
        return torch.tensor(picks, dtype=operands.topk_ids.dtype, device=self.device)

    def calls(
        self, bound: Mapping[str, Prepared], order: Sequence[StepPlace]
    ) -> list[tuple[StepPlace, Call]]:
        """What the step does, place by place: the implementation bound there, or glue that reads where the
        last call wrote and writes where the next one reads."""
        self.bound = bound
        return [
            (
                place,
                self._op(place, bound[place.key]) if place.op else getattr(self, _METHODS[place.name])(place),
            )
            for place in order
        ]

    def _op(self, place: StepPlace, bound: Prepared) -> Call:
        """The bound call, after what it reads elsewhere than where glue writes was brought there."""
        live = bound.operands.live_tensors()
        apart = [
            (target, live[name])
            for name, target in bound.inputs().items()
            if name not in WRITTEN_IN_PLACE and target.data_ptr() != live[name].data_ptr()
        ]
        goes_on = place.op == "mha_prefill" and (
            bound.out is None or bound.out.data_ptr() != self.attended.data_ptr()
        )
        if not apart and not goes_on:
            return bound.call
        heads, width = self.step.heads, self.step.model.v_head_dim

        def call() -> None:
            for target, source in apart:
                target.copy_(source)
            bound.call()
            if goes_on:
                self.attended.view(-1, heads, width).copy_(bound.result())

        return call

    def _result(self, place: StepPlace, name: str) -> Callable[[], torch.Tensor]:
        return self.bound[f"{place.layer}.{name}"].result

    def _weight(self, place: StepPlace, *shape: int, size: float = 0.02) -> torch.Tensor:
        key = (place.layer, place.name)
        if key not in self.weights:
            self.weights[key] = self._normal(*shape, size=size)
        return self.weights[key]

    def _ones(self, place: StepPlace, width: int, which: str = "") -> torch.Tensor:
        key = (place.layer, place.name + which)
        if key not in self.weights:
            self.weights[key] = self._empty(width).fill_(1.0)
        return self.weights[key]

    def embedding(self, place: StepPlace) -> Call:
        import torch

        tokens = self.step.linear("lm_head").n
        table = self._weight(place, tokens, self.step.model.hidden_size)
        ids = torch.arange(self.step.tokens, device=self.device) * 7919 % tokens
        return lambda: torch.index_select(table, 0, ids, out=self.residual)

    def input_norm(self, place: StepPlace) -> Call:
        weight = self._ones(place, self.step.model.hidden_size)
        if place.layer == 0:
            return lambda: glue.rms_norm(self.residual, weight, self.normed)
        output = self._output(place.layer - 1)
        return lambda: glue.add_rms_norm(output(), self.residual, weight, self.normed)

    def _output(self, layer: int) -> Callable[[], torch.Tensor]:
        """What a layer adds to the residual."""
        if layer < self.step.dense:
            return self.bound[f"{layer}.dense down"].result
        return lambda: self.hidden

    def post_attention_norm(self, place: StepPlace) -> Call:
        weight, result = self._ones(place, self.step.model.hidden_size), self._result(place, "o_proj")
        return lambda: glue.add_rms_norm(result(), self.residual, weight, self.normed)

    def latent_norms(self, place: StepPlace) -> Call:
        model, result = self.step.model, self._result(place, "qkv_a")
        q_weight = self._ones(place, model.q_lora_rank)
        kv_weight = self._ones(place, model.kv_lora_rank, " kv")
        widths = [model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim]

        def call() -> None:
            q, latent, self.k_rope = result().split(widths, -1)
            glue.rms_norm(q.contiguous(), q_weight, self.q_latent)
            glue.rms_norm(latent.contiguous(), kv_weight, self.latent)

        return call

    def rope_and_write(self, place: StepPlace) -> Call:
        import torch

        model, result = self.step.model, self._result(place, "q_b")
        width = [model.qk_nope_head_dim, model.qk_rope_head_dim]
        cache = pages = rows = None
        if self.step.phase == "decode":
            bound = self.bound[f"{place.layer}.mla_decode"]
            cache, operands = bound.inputs()["kv"], cast("MlaDecodeOperands", bound.operands)
            ends = [operands.token_slots(i)[-1:] for i in range(len(operands.host_lengths))]
            last = torch.cat(ends)
            pages, rows = last // operands.page, last % operands.page

        def call() -> None:
            q = result().view(self.step.tokens, self.step.heads, sum(width))
            self.q_nope, q_rope = q.split(width, -1)
            self.q_rope = glue.rotary(q_rope, self.cos, self.sin)
            self.k_turned = glue.rotary(self.k_rope.unsqueeze(1), self.cos, self.sin)
            if cache is not None:
                row = torch.cat((self.latent, self.k_turned.squeeze(1)), -1)
                cache.index_put_((pages, rows), row.to(cache.dtype))

        return call

    def w_uk(self, place: StepPlace) -> Call:
        import torch

        model = self.step.model
        weight = self._weight(place, self.step.heads, model.qk_nope_head_dim, model.kv_lora_rank)

        def call() -> None:
            self.q_latents = torch.bmm(self.q_nope.transpose(0, 1), weight)

        return call

    def q_together(self, place: StepPlace) -> Call:
        q = self.bound[f"{place.layer}.mla_decode"].inputs()["q"]
        latent = self.step.model.kv_lora_rank

        def call() -> None:
            q[..., :latent].copy_(self.q_latents.transpose(0, 1))
            q[..., latent:].copy_(self.q_rope)

        return call

    def w_uv(self, place: StepPlace) -> Call:
        import torch

        model, result = self.step.model, self._result(place, "mla_decode")
        weight = self._weight(place, self.step.heads, model.kv_lora_rank, model.v_head_dim)
        out = self.attended.view(self.step.tokens, self.step.heads, model.v_head_dim)
        return lambda: out.copy_(torch.bmm(result().transpose(0, 1), weight).transpose(0, 1))

    def qkv_together(self, place: StepPlace) -> Call:
        model, result = self.step.model, self._result(place, "kv_b")
        inputs = self.bound[f"{place.layer}.mha_prefill"].inputs()
        into_q, into_k, into_v = inputs["q"], inputs["k"], inputs["v"]
        nope, value = model.qk_nope_head_dim, model.v_head_dim

        def call() -> None:
            k, v = result().view(self.step.tokens, self.step.heads, nope + value).split([nope, value], -1)
            into_q[..., :nope].copy_(self.q_nope)
            into_q[..., nope:].copy_(self.q_rope)
            into_k[..., :nope].copy_(k)
            into_k[..., nope:].copy_(self.k_turned)
            into_v.copy_(v)

        return call

    def gate(self, place: StepPlace) -> Call:
        first = place.name.split()[0]
        result = self._result(place, f"{first} gate_up")
        down = self.bound[f"{place.layer}.{first} down"]
        out = cast("BlockScaleGemmOperands", down.operands).a
        return lambda: glue.silu_and_mul(result(), out)

    def router(self, place: StepPlace) -> Call:
        import torch

        model = self.step.model
        weight = self._weight(place, model.n_routed_experts, model.hidden_size)

        def call() -> None:
            self.scores = torch.nn.functional.linear(self.normed, weight).float()

        return call

    def top_k(self, place: StepPlace) -> Call:
        """The choice is made for its time; the experts that run are the recorded or stated ones."""
        import torch

        from kernels.fused_moe.routing import Router, router

        model, sizes = self.step.model, self.moe_sizes()
        logits = torch.zeros(self.step.tokens, model.n_routed_experts, device=self.device)
        bias = torch.zeros(model.n_routed_experts, device=self.device)
        ids = torch.empty(self.step.tokens, sizes.topk, dtype=torch.int32, device=self.device)
        groups, limit = sizes.group_limit
        scaling, experts = model.routed_scaling_factor, model.n_routed_experts
        rule = Router(groups, limit, sizes.topk, scaling, local=experts, shared=0)
        route = router(logits, bias, ids, torch.empty(ids.shape, device=self.device), rule)

        def call() -> None:
            logits.copy_(self.scores)
            route()

        return call

    def moe_sizes(self) -> Any:
        op = kernels.OPS["fused_moe"]
        return op.sizes(self.step.sizes(StepPlace(0, "fused_moe", "fused_moe", "fused_moe")))

    def sum_with_shared(self, place: StepPlace) -> Call:
        routed, shared = self._result(place, "fused_moe"), self._result(place, "shared down")

        def call() -> None:
            self.hidden = routed() + shared()

        return call

    def final_norm(self, place: StepPlace) -> Call:
        weight = self._ones(place, self.step.model.hidden_size)
        output = self._output(place.layer - 1)
        return lambda: glue.add_rms_norm(output(), self.residual, weight, self.normed)

    def lm_head(self, place: StepPlace) -> Call:
        import torch

        weight = self._weight(place, self.step.linear("lm_head").n, self.step.model.hidden_size)
        rows = self._last_rows()

        def call() -> None:
            self.logits = torch.nn.functional.linear(self.normed[rows], weight)

        return call

    def _last_rows(self) -> torch.Tensor:
        import itertools

        import torch

        ends = itertools.accumulate(self.step.new or (1,) * len(self.step.contexts))
        return torch.tensor([end - 1 for end in ends], device=self.device)

    def sampling(self, place: StepPlace) -> Call:
        def call() -> None:
            self.chosen = self.logits.argmax(-1)

        return call


_METHODS = {
    "embedding": "embedding",
    "input norm": "input_norm",
    "latent norms": "latent_norms",
    "rope and KV write": "rope_and_write",
    "w_uk": "w_uk",
    "q together": "q_together",
    "w_uv": "w_uv",
    "q, k, v together": "qkv_together",
    "post-attention norm": "post_attention_norm",
    "dense SiLU": "gate",
    "shared SiLU": "gate",
    "router": "router",
    "top-k": "top_k",
    "sum with shared": "sum_with_shared",
    "final norm": "final_norm",
    "lm_head": "lm_head",
    "sampling": "sampling",
}
