"""Activations of a step, and the glue that carries them from one place to the next: norms, rotary embedding,
router, absorbed products, in torch.

Glue is the same in all arms: it is there for the caches and the time it takes, and its speed is no claim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

import kernels
from harness.serving.replay.step import ReplayStep, StepPlace
from kernels.fused_moe.routing import Router, router
from kernels.op import Prepared

Call = Callable[[], Any]
Bound = Mapping[str, Prepared]

EPSILON = 1e-6
WRITTEN_IN_PLACE = ("q", "kv")
"""Live operands that glue writes straight into the layout which the bound call reads, as engines do."""


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, 64] turned by cos, sin [32]; neighbours are a pair, as in DeepSeek."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class Flow:
    """The buffers that all arms share. A place of glue is the method of its name: on what the places before
    it left it does one layer's. What it allocates is the arm's own."""

    def __init__(self, step: ReplayStep, device: str, seed: int) -> None:
        self.step, self.device, self.model = step, device, step.model
        self.generator = torch.Generator(device).manual_seed(seed)
        model, tokens, heads = step.model, step.batch, step.heads
        self.nope, self.rope, self.value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        self.embedded = self._normal(tokens, model.hidden_size)
        self.residual = self._empty(tokens, model.hidden_size)
        self.normed = self._empty(tokens, model.hidden_size)
        self.q_latent = self._empty(tokens, model.q_lora_rank)
        self.latent = self._empty(tokens, model.kv_lora_rank)
        self.attended = self._empty(tokens, heads, model.v_head_dim)
        self.logits = self._empty(1)
        self.scores = torch.zeros(tokens, model.n_routed_experts, device=device)
        self.weights: dict[tuple[str, int], torch.Tensor] = {}
        self.slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        angles = (step.ctx - 1) * 10000.0 ** (-torch.arange(0, 64, 2, device=device) / 64)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def _normal(self, *shape: int, size: float = 1.0) -> torch.Tensor:
        return self._empty(*shape).normal_(0, size, generator=self.generator)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device)

    def _weight(self, name: str, layer: int, *shape: int) -> torch.Tensor:
        if (name, layer) not in self.weights:
            self.weights[name, layer] = self._normal(*shape, size=0.02)
        return self.weights[name, layer]

    def joined(self, place: StepPlace, operands: Any) -> Any:
        """The operands with the step's own buffers as their live inputs."""
        inputs = {"qkv_a": self.normed, "q_b": self.q_latent, "o_proj": self.attended.flatten(1)}
        inputs |= {"dense gate_up": self.normed, "shared gate_up": self.normed}
        if place.name in inputs:
            return operands.replaced(a=inputs[place.name])
        if place.op == "fused_moe":
            return operands.replaced(x=self.normed)
        if place.op == "mla_decode":
            operands.kv.copy_(self._normal(*operands.kv.shape).to(operands.kv.dtype))
        return operands

    def calls(self, bound: Bound, order: Sequence[StepPlace]) -> list[Call]:
        """What the step does, place by place: the implementation bound there, or glue that reads where the
        last call wrote and writes where the next one reads."""
        return [
            self._op(bound[place.key]) if place.op else partial(self._glue(place), bound, place.layer)
            for place in order
        ]

    def _glue(self, place: StepPlace) -> Callable[..., None]:
        return getattr(self, re.sub(r"\W", "_", place.name.lower()))

    def _op(self, bound: Prepared) -> Call:
        """The bound call, after what it reads elsewhere than where glue writes was brought there."""
        live = bound.operands.live_tensors()
        copies = [
            (target, live[name])
            for name, target in bound.inputs().items()
            if name not in WRITTEN_IN_PLACE and target.data_ptr() != live[name].data_ptr()
        ]

        def call() -> None:
            for target, source in copies:
                target.copy_(source)
            bound.call()

        return call if copies else bound.call

    def norm(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x / rms(x), by row; its weights are 1."""
        out.copy_(rms_norm(x, x.shape[-1:], eps=EPSILON))

    def add_norm(self, added: torch.Tensor) -> None:
        self.residual.add_(added)
        self.norm(self.residual, self.normed)

    def embedding(self, bound: Bound, layer: int) -> None:
        self.residual.copy_(self.embedded)

    def input_norm(self, bound: Bound, layer: int) -> None:
        """Of a layer, or after the last one: of the residual with what the layer before adds to it."""
        if not layer:
            self.norm(self.residual, self.normed)
        elif layer <= self.step.dense:
            self.add_norm(bound[f"{layer - 1}.dense down"].result())
        else:
            self.add_norm(self.hidden)

    final_norm = input_norm

    def post_attention_norm(self, bound: Bound, layer: int) -> None:
        self.add_norm(bound[f"{layer}.o_proj"].result())

    def latent_norms(self, bound: Bound, layer: int) -> None:
        widths = [self.model.q_lora_rank, self.model.kv_lora_rank, self.rope]
        q, latent, self.k_rope = bound[f"{layer}.qkv_a"].result().split(widths, -1)
        self.norm(q, self.q_latent)
        self.norm(latent, self.latent)

    def rope_and_kv_write(self, bound: Bound, layer: int) -> None:
        q = bound[f"{layer}.q_b"].result().view(self.step.batch, self.step.heads, self.nope + self.rope)
        self.q_nope, q_rope = q.split([self.nope, self.rope], -1)
        self.q_rope = rotary(q_rope, self.cos, self.sin)
        k_rope = rotary(self.k_rope.unsqueeze(1), self.cos, self.sin)
        decode = bound[f"{layer}.mla_decode"]
        if layer not in self.slots:
            operands: Any = decode.operands
            last = torch.cat([operands.token_slots(request)[-1:] for request in range(self.step.batch)])
            self.slots[layer] = (last // operands.page, last % operands.page)
        cache, row = decode.inputs()["kv"], torch.cat((self.latent, k_rope.squeeze(1)), -1)
        cache.index_put_(self.slots[layer], row.to(cache.dtype))

    def w_uk(self, bound: Bound, layer: int) -> None:
        weight = self._weight("w_uk", layer, self.step.heads, self.nope, self.model.kv_lora_rank)
        self.q_latents = torch.bmm(self.q_nope.transpose(0, 1), weight)

    def q_together(self, bound: Bound, layer: int) -> None:
        q = bound[f"{layer}.mla_decode"].inputs()["q"]
        q[..., : self.model.kv_lora_rank].copy_(self.q_latents.transpose(0, 1))
        q[..., self.model.kv_lora_rank :].copy_(self.q_rope)

    def w_uv(self, bound: Bound, layer: int) -> None:
        weight = self._weight("w_uv", layer, self.step.heads, self.model.kv_lora_rank, self.value)
        latents = bound[f"{layer}.mla_decode"].result().transpose(0, 1)
        self.attended.copy_(torch.bmm(latents, weight).transpose(0, 1))

    def dense_silu(self, bound: Bound, layer: int) -> None:
        self.gate(bound, f"{layer}.dense")

    def shared_silu(self, bound: Bound, layer: int) -> None:
        self.gate(bound, f"{layer}.shared")

    def gate(self, bound: Bound, linears: str) -> None:
        gate, up = bound[f"{linears} gate_up"].result().chunk(2, -1)
        down: Any = bound[f"{linears} down"].operands
        torch.mul(silu(gate), up, out=down.a)

    def router(self, bound: Bound, layer: int) -> None:
        weight = self._weight("router", layer, self.model.n_routed_experts, self.model.hidden_size)
        self.scores.copy_(linear(self.normed, weight))

    def top_k(self, bound: Bound, layer: int) -> None:
        """The choice is made for its time; the experts that run are those of the routing's pattern."""
        self.route()

    @cached_property
    def route(self) -> Call:
        op, experts = kernels.OPS["fused_moe"], self.model.n_routed_experts
        sizes: Any = op.sizes(self.step.sizes(StepPlace(0, "fused_moe")))
        groups, limit = sizes.group_limit
        rule = Router(groups, limit, sizes.topk, self.model.routed_scaling_factor, local=experts, shared=0)
        bias = torch.zeros(experts, device=self.device)
        ids = torch.empty(self.step.batch, sizes.topk, dtype=torch.int32, device=self.device)
        return router(self.scores, bias, ids, torch.empty(ids.shape, device=self.device), rule)

    def sum_with_shared(self, bound: Bound, layer: int) -> None:
        self.hidden = bound[f"{layer}.fused_moe"].result() + bound[f"{layer}.shared down"].result()

    def lm_head(self, bound: Bound, layer: int) -> None:
        weight = self._weight("lm_head", 0, self.step.linear("lm_head").n, self.model.hidden_size)
        self.logits = linear(self.normed, weight)

    def sampling(self, bound: Bound, layer: int) -> None:
        self.chosen = self.logits.argmax(-1)
