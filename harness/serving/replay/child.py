"""The worker of a replay: a rank's weights, and its step with implementations and glue.

Glue is the rest of the step in torch: norms, rotary embedding, router, absorbed products. It is the same in
all arms, and its speed is not judged.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, partialmethod
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

import kernels
from harness.serving.replay.step import ReplayStep, StepPlace
from harness.workers.child.device import ready_device
from harness.workers.child.timers import Program, timer_for
from kernels.compose import bind
from kernels.fused_moe.routing import Router, router
from kernels.op import Prepared, Unsupported
from kernels.operands import Seeds

Call = Callable[[], Any]
Bound = Mapping[str, Prepared]  # by the key of a place

EPSILON = 1e-6
WRITTEN_IN_PLACE = ("q", "kv")  # live operands that glue writes in the bound call's layout, as engines do
BOUNDARY = {"block_scale_gemm": "with_quant", "fused_moe": "with_quant"}  # of other ops `core`


class Rank:
    """A rank: the canonical operands of each place, one set for each layer. Activations flow from place to
    place in buffers that all arms share. An implementation packs its weights once, whatever the arm.

    Each public method is one request of the parent; arguments and answers are plain values.
    """

    def hello(self, kind: str, device: str, threads: int, planned: Any = None) -> dict[str, Any]:
        self.kind, self.device = kind, device
        ready = ready_device(kind, device, threads, planned)
        self.arch = ready["target"]["arch"]
        return ready

    def open(self, step: ReplayStep, seed: int, launch: str) -> None:
        """Makes all weights and buffers anew. No implementation is bound to them yet."""
        self.prepared: dict[tuple[str, str], Prepared] = {}
        self.programs: dict[str, Program] = {}
        self.calls: dict[str, list[Call]] = {}
        self.step, self.seed, self.places = step, seed, step.places()
        self.timer = timer_for(self.kind, launch)
        self.flow = Flow(step, self.device, seed)
        self.operands = {place.key: self._operands(place) for place in step.op_places()}

    def _operands(self, place: StepPlace) -> Any:
        op = kernels.OPS[place.op]
        sizes = op.sizes({**self.step.sizes(place), **op.defaults(self.arch)})
        seeds = Seeds(stationary=1000 * self.seed + place.layer, live=place.layer)
        operands = op.operands(sizes, seeds, self.device, BOUNDARY.get(place.op, "core"))
        return self.flow.with_buffers(place, operands)

    def prepare(self, arm: str, chosen: dict[str, str]) -> None:
        """Binds the places of the step, and on a GPU records them into one graph. chosen: as in the parent's
        Arms. Raises Unsupported if one cannot be used, ArithmeticError if the step gives no numbers."""
        bound = {place.key: self._bound(place, chosen) for place in self.step.op_places()}
        calls = self.calls[arm] = self.flow.calls(bound, self.places)
        for call in calls:
            call()
        if not self.flow.logits.isfinite().all():
            raise ArithmeticError("the step's logits are not all finite")
        self.programs[arm] = self.timer.program([lambda: [call() for call in calls]])
        self.timer.synchronize()

    def _bound(self, place: StepPlace, chosen: dict[str, str]) -> Prepared:
        name = place.implementation(chosen)
        if (place.key, name) not in self.prepared:
            op = kernels.OPS[place.op]
            row = next((row for row in kernels.implementations(place.op) if row.name == name), None)
            if row is None:
                raise Unsupported(f"there is no implementation {name} of {place.op}")
            operands = self.operands[place.key]
            out = None if row.allocates else op.empty_output(operands.sizes, self.device)
            prepared = bind(op, row, operands, out)
            prepared.load(operands.live_tensors())
            self.prepared[place.key, name] = prepared
        return self.prepared[place.key, name]

    def sample(self, arm: str, at_least: float) -> float:
        """Seconds of a step, averaged over a sample of steps."""
        return self.timer.sample(self.programs[arm], at_least).seconds

    def alone(self, place: str, arms: Sequence[str], samples: int, at_least: float) -> dict[str, float]:
        """For each arm the seconds of all layers' calls of a place, made one after another and launched as
        the step is. It is the median of so many samples, between which the arms alternate."""
        in_layers = [i for i, known in enumerate(self.places) if known.name == place]
        programs = {arm: self.timer.program([self.calls[arm][i] for i in in_layers]) for arm in arms}
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(samples):
            for arm, program in programs.items():
                mean_call_s = self.timer.sample(program, at_least).seconds
                seconds[arm].append(len(in_layers) * mean_call_s)
        return {arm: statistics.median(seconds[arm]) for arm in arms}

    def difference(self, base: dict[str, str], chosen: dict[str, str]) -> dict[str, float]:
        """The relative difference of outputs (root mean square) at each swapped place, in its first layer."""
        differences: dict[str, float] = {}
        for place in self.step.op_places():
            swapped = place.implementation(base) != place.implementation(chosen)
            if swapped and place.name not in differences:
                first, second = self._bound(place, base), self._bound(place, chosen)
                live = {name: tensor.clone() for name, tensor in first.inputs().items()}
                first.call()
                expected = first.result().float().clone()
                second.load(live)
                second.call()
                error = (second.result().float() - expected).pow(2).mean().sqrt()
                differences[place.name] = float(error / expected.pow(2).mean().sqrt())
        return differences


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns x [tokens, heads, 64] by cos, sin [32]; neighbours are a pair, as in DeepSeek."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class Flow:
    """The glue, and the buffers that all arms share. Each place of glue has a method of its name, which
    computes the glue of one layer from what the places before it left in buffers and attributes. Tensors that
    a method allocates are not shared: they are in the arm's graph."""

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
        # Of the last token; base and head size are those of DeepSeek-V3's rotary embedding.
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

    def with_buffers(self, place: StepPlace, operands: Any) -> Any:
        """The operands, with the step's own buffers as their live inputs."""
        inputs = {"qkv_a": self.normed, "q_b": self.q_latent, "o_proj": self.attended.flatten(1)}
        inputs |= {"dense gate_up": self.normed, "shared gate_up": self.normed}
        if place.name in inputs:
            return operands.replaced(a=inputs[place.name])
        if place.op == "fused_moe":
            return operands.replaced(x=self.normed)
        if place.op == "mla_decode":  # attention over a filled cache
            operands.kv.copy_(self._normal(*operands.kv.shape).to(operands.kv.dtype))
        return operands

    def calls(self, bound: Bound, order: Sequence[StepPlace]) -> list[Call]:
        """The calls of the step, place by place: the implementation that is bound there, or glue that reads
        where the last call wrote and writes where the next one reads."""
        calls: list[Call] = []
        for place in order:
            if place.op:
                calls.append(self._op(bound[place.key]))
            else:
                glue = getattr(self, re.sub(r"\W", "_", place.name.lower()))
                calls.append(partial(glue, bound, place.layer))
        return calls

    def _op(self, bound: Prepared) -> Call:
        """The bound call. Glue writes the canonical operands; if the implementation reads copies of some in
        another layout, they are copied before the call."""
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
        """out = x / rms(x), by row; the weights of the norm are 1."""
        out.copy_(rms_norm(x, x.shape[-1:], eps=EPSILON))

    def add_norm(self, added: torch.Tensor) -> None:
        self.residual.add_(added)
        self.norm(self.residual, self.normed)

    def embedding(self, bound: Bound, layer: int) -> None:
        self.residual.copy_(self.embedded)

    def input_norm(self, bound: Bound, layer: int) -> None:
        """The norm before a layer, or after the last one, with the output of the layer before added."""
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
        q = bound[f"{layer}.mla_decode"].inputs()["q"][:, 0]
        q[..., : self.model.kv_lora_rank].copy_(self.q_latents.transpose(0, 1))
        q[..., self.model.kv_lora_rank :].copy_(self.q_rope)

    def w_uv(self, bound: Bound, layer: int) -> None:
        weight = self._weight("w_uv", layer, self.step.heads, self.model.kv_lora_rank, self.value)
        latents = bound[f"{layer}.mla_decode"].result()[:, 0].transpose(0, 1)
        self.attended.copy_(torch.bmm(latents, weight).transpose(0, 1))

    def _silu(self, kind: str, bound: Bound, layer: int) -> None:
        gate, up = bound[f"{layer}.{kind} gate_up"].result().chunk(2, -1)
        down: Any = bound[f"{layer}.{kind} down"].operands
        torch.mul(silu(gate), up, out=down.a)

    dense_silu, shared_silu = partialmethod(_silu, "dense"), partialmethod(_silu, "shared")

    def router(self, bound: Bound, layer: int) -> None:
        weight = self._weight("router", layer, self.model.n_routed_experts, self.model.hidden_size)
        self.scores.copy_(linear(self.normed, weight))

    def top_k(self, bound: Bound, layer: int) -> None:
        """The choice of experts is made for its time only: the routing's pattern says which experts run."""
        self._bound_router()

    @cached_property
    def _bound_router(self) -> Call:
        """The router of the op, bound to the buffer of scores, which router() fills."""
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
