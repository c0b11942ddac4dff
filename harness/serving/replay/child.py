"""Replay worker: a rank's weights, and the step bound to implementations.

Every public method is one request that the parent makes; arguments and answers are plain values.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import kernels
from harness.serving.replay.flow import Call, Flow
from harness.serving.replay.step import ReplayStep, StepPlace
from harness.workers.child.device import ready_device
from harness.workers.child.timers import timer_for
from harness.workers.child.timers.base import Program
from kernels.compose import bind
from kernels.op import Prepared, Unsupported
from kernels.operands import Seeds

BOUNDARY = {"block_scale_gemm": "with_quant", "fused_moe": "with_quant"}


class Rank:
    """Canonical operands of every place, one set a layer; activations flow from place to place in buffers
    that all arms share. What an implementation packs for itself it packs once, whatever the arm."""

    def hello(
        self, kind: str, device: str, threads: int, planned: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        self.kind, self.device = kind, device
        ready = ready_device(kind, device, threads, planned)
        self.arch = ready["target"]["arch"]
        return ready

    def open(self, step: ReplayStep, seed: int, launch: str) -> None:
        """Makes all weights and buffers anew; no implementation is bound to them yet."""
        self.prepared: dict[tuple[str, str], Prepared] = {}
        self.programs: dict[str, Program] = {}
        self.calls: dict[str, list[Call]] = {}
        self.operands: dict[str, Any] = {}
        self.step, self.seed, self.places = step, seed, step.places()
        self.timer = timer_for(self.kind, launch)
        self.flow = Flow(step, self.device, seed)
        for place in step.op_places():
            self.operands[place.key] = self._operands(place)

    def _operands(self, place: StepPlace) -> Any:
        op = kernels.OPS[place.op]
        sizes = op.sizes({**self.step.sizes(place), **op.defaults(self.arch)})
        seeds = Seeds(stationary=1000 * self.seed + place.layer, live=place.layer)
        operands = op.operands(sizes, seeds, self.device, BOUNDARY.get(place.op, "core"))
        return self.flow.joined(place, operands)

    def prepare(self, arm: str, chosen: dict[str, str]) -> None:
        """Binds the step's places and, on a GPU, records them into one graph. chosen: `op` or `op:place` ->
        implementation. Raises Unsupported where one cannot be had, or gives no numbers."""
        bound = {place.key: self._bound(place, chosen) for place in self.step.op_places()}
        calls = self.calls[arm] = self.flow.calls(bound, self.places)
        for call in calls:
            call()
        if not self.flow.logits.isfinite().all():
            raise Unsupported("the step's logits are not all finite")
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

    def turn(self, arm: str, at_least: float) -> float:
        """Seconds of a step, over as many as fill the turn."""
        return self.timer.turn(self.programs[arm], at_least).seconds

    def alone(self, place: str, arms: Sequence[str], turns: int, at_least: float) -> dict[str, float]:
        """Of each arm the seconds that a place's calls of all layers take one after another, launched as the
        step is: the median of so many turns, between which the arms alternate."""
        at = [number for number, each in enumerate(self.places) if each.name == place]
        calls = {arm: [self.calls[arm][number] for number in at] for arm in arms}
        programs = {arm: self.timer.program(calls[arm]) for arm in arms}
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(turns):
            for arm, program in programs.items():
                seconds[arm].append(len(at) * self.timer.turn(program, at_least).seconds)
        return {arm: statistics.median(each) for arm, each in seconds.items()}

    def difference(self, base: dict[str, str], chosen: dict[str, str]) -> dict[str, float]:
        """Of two choices: the relative difference (root mean square) of their outputs at each place where
        they differ, in the first layer that has it, on the same inputs."""
        differences: dict[str, float] = {}
        for place in self.step.op_places():
            swapped = place.implementation(base) != place.implementation(chosen)
            if swapped and place.name not in differences:
                first, second = self._bound(place, base), self._bound(place, chosen)
                live = {name: tensor.clone() for name, tensor in first.inputs().items()}
                first.call()
                wanted = first.result().float().clone()
                second.load(live)
                second.call()
                error = (second.result().float() - wanted).pow(2).mean().sqrt()
                differences[place.name] = float(error / wanted.pow(2).mean().sqrt())
        return differences
