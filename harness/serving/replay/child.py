"""Replay worker: a rank's weights, and the step bound to implementations.

Every public method is one request that the parent makes; arguments and answers are plain values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import kernels
from harness.machine.cpu_threads import MAIN_THREAD
from harness.serving.replay.flow import Flow
from harness.serving.replay.step import ReplayStep, StepPlace, places
from harness.workers.child.device import ready_device
from harness.workers.child.timers import timer_for
from harness.workers.child.timers.base import Program
from kernels.compose import bind
from kernels.op import Op, Prepared, Unsupported
from kernels.operands import Seeds
from shapes.case import Size

Call = Callable[[], Any]
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
        """Makes all weights and buffers anew; nobody is prepared on them yet."""
        self.prepared: dict[tuple[str, str, str], Prepared] = {}
        self.programs: dict[str, Program] = {}
        self.calls: dict[str, list[tuple[StepPlace, Call]]] = {}
        self.operands: dict[str, Any] = {}
        self.step, self.seed = step, seed
        self.places = places(step)
        self.timer = timer_for(self.kind, launch)
        self.flow = Flow(step, self.device, seed)
        for place in self.places:
            if place.op:
                self.operands[place.key] = self._operands(place)

    def _operands(self, place: StepPlace) -> Any:
        op = kernels.OPS[place.op]
        sizes = op.sizes({**self.step.sizes(place), **self._format(op)})
        seeds = Seeds(stationary=1000 * self.seed + place.layer, live=place.layer)
        operands = op.operands(sizes, seeds, self.device, BOUNDARY.get(place.op, "core"))
        return self.flow.joined(place, operands)

    def _format(self, op: Op) -> Mapping[str, Size]:
        return op.defaults(self.arch)

    def prepare(self, arm: str, chosen: Mapping[str, str], apart: bool = False) -> float:
        """Binds the step's places: chosen is `op` or `op:place` -> implementation. Returns the seconds.
        Raises Unsupported where one cannot be had.

        apart: everything is bound anew, sharing nothing but operands with the other arms
        """
        started = time.perf_counter()
        bound = {p.key: self._bound(p, chosen, arm if apart else "") for p in self.places if p.op}
        calls = self.flow.calls(bound, self.places)
        for _, call in calls:
            call()
        self.calls[arm] = calls
        self.programs[arm] = self.timer.program([lambda: [call() for _, call in calls]])
        self.timer.synchronize()
        return time.perf_counter() - started

    def _bound(self, place: StepPlace, chosen: Mapping[str, str], owner: str = "") -> Prepared:
        name = chosen.get(f"{place.op}:{place.name}") or chosen[place.op]
        if (place.key, name, owner) not in self.prepared:
            op = kernels.OPS[place.op]
            implementation = next((i for i in kernels.implementations(place.op) if i.name == name), None)
            if implementation is None:
                raise Unsupported(f"there is no implementation {name} of {place.op}")
            operands = self.operands[place.key]
            out = None if implementation.allocates else self.flow.output(place, operands)
            prepared = bind(op, implementation, operands, out)
            prepared.load(operands.live_tensors())
            self.prepared[place.key, name, owner] = prepared
        return self.prepared[place.key, name, owner]

    def turn(self, arm: str, at_least: float) -> float:
        """Seconds of a step, over as many as fill the turn."""
        return self.timer.turn(self.programs[arm], at_least).seconds

    def decompose(self, arm: str, repeats: int) -> dict[str, float]:
        """Seconds that each place takes in the step, by its key: the median of so many steps, each call timed
        by itself (on a GPU launched eagerly and waited for). They add up to more than the step."""
        times: dict[str, list[float]] = {place.key: [] for place, _ in self.calls[arm]}
        with MAIN_THREAD.in_place():
            for _ in range(repeats):
                for place, call in self.calls[arm]:
                    started = time.perf_counter()
                    call()
                    self.timer.synchronize()
                    times[place.key].append(time.perf_counter() - started)
        return {key: sorted(seconds)[len(seconds) // 2] for key, seconds in times.items()}

    def isolated(self, place: str, name: str, cold: bool, at_least: float) -> float:
        """Seconds of one place's call alone: `cold`, over all layers that have the place in turn, as the
        step streams them, or warm, the first layer's again and again."""
        calls = [
            prepared.call
            for (key, implementation, owner), prepared in self.prepared.items()
            if implementation == name and key.split(".", 1)[1] == place and not owner
        ]
        program = self.timer.program(calls if cold else calls[:1])
        return self.timer.turn(program, at_least).seconds

    def difference(self, op: str, a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, float]:
        """Of two choices for an op: the relative difference (root mean square) of their outputs at each place
        of the first layer that has it, on the same inputs."""
        differences = {}
        for place in self.places:
            if place.op == op and place.name not in differences:
                first, second = (self._bound(place, chosen) for chosen in (a, b))
                live = {name: tensor.clone() for name, tensor in first.inputs().items()}
                first.call()
                wanted = first.result().float().clone()
                second.load(live)
                second.call()
                error = (second.result().float() - wanted).pow(2).mean().sqrt()
                differences[place.name] = float(error / wanted.pow(2).mean().sqrt())
        return differences

    def finite(self) -> bool:
        """Whether the last step's logits are numbers."""
        return bool(self.flow.logits.isfinite().all())
