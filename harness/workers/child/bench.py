"""Bench, inside a worker: one case's operands and the contenders prepared on them.

Every public method is one request that the parent makes; arguments and answers are plain values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import kernels
from harness.workers.child import heap
from harness.workers.child.device import ready_device
from harness.workers.child.fingerprint import fingerprint
from harness.workers.child.profile import profile
from harness.workers.child.source_hash import source_of
from harness.workers.child.timers import timer_for
from harness.workers.child.timers.base import Program, Timer
from kernels.compose import bind
from kernels.op import Implementation, Op, Prepared, Unsupported
from kernels.operands import Operands, Seeds

# Where the first calls after preparing anew take on average no more than this many times as long as those
# that are timed, they are spared from then on.
AS_LONG = 1.1


@dataclass
class _Ready:
    """A contender: prepared once on each set of operands, with the program that turns run."""

    prepared: list[Prepared]
    timer: Timer
    program: Program


class Bench:
    """Holds the sets of operands (the first is checked; the others make calls rotate) and the contenders.

    guests: implementations that no folder or plugin holds
    """

    op: Op
    sets: list[Operands]

    def __init__(self, *guests: Implementation) -> None:
        self.guests = guests
        self.ready: dict[str, _Ready] = {}
        self.case: tuple[str, dict[str, Any], str] | None = None
        # Seconds per call that preparing anew made; and, of whom it may spare them, of those timed.
        self.first_s: dict[str, float] = {}
        self.settled_s: dict[str, float] = {}
        self.timers: dict[str, Timer] = {}

    def hello(self, kind: str, device: str, threads: int) -> dict[str, Any]:
        self.kind, self.device, self.threads = kind, device, threads
        return ready_device(kind, device, threads)

    def open(self, op: str, sizes: Mapping[str, Any], boundary: str, seeds: Mapping[str, Any]) -> int:
        """Makes the canonical operands; the digest tells the parent whether they are the judge's."""
        self.close()
        case = (op, dict(sizes), boundary)
        if case != self.case:
            self.case = case
            self.first_s.clear()
            self.settled_s.clear()
        self.op = kernels.OPS[op]
        self.sizes = self.op.sizes(sizes)
        self.boundary = boundary
        self.sets = [self._make(seeds)]
        return self.sets[0].digest()

    def _make(self, seeds: Mapping[str, Any]) -> Operands:
        return self.op.make(self.sizes, Seeds(**seeds), self.device, self.boundary)

    def fresh(self, mode: str, copies: int) -> None:
        """Moves the operands to fresh buffers, in `copies` sets: those that a serving step streams are
        each set's own, the others shared (`cold`: all are its own). Everybody has to be prepared again."""
        for name, ready in self.ready.items():
            timed_s = ready.program.device_s
            if ready.program.taken and self.first_s[name] <= AS_LONG * timed_s < math.inf:
                self.settled_s[name] = timed_s
        self.ready.clear()
        first = self.sets[0].copy()
        self.sets = [first]  # frees the others before new ones are made
        heap.give_back()
        self.sets += [first.turned(turn, mode == "cold") for turn in range(1, copies)]

    def prepare(
        self,
        contender: str,
        impl: str,
        launch: str,
        call: bool = True,
        config: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Prepares on every set and calls each once (JIT compilers run here), on a CPU until that was seen to
        change nothing. Returns the seconds, whether a call synchronises the host, and a hash of its source.
        Raises Unsupported where a call cannot be launched so.

        call:   False spares the calls where nothing will be timed
        config: that a tunable implementation is told to use; None: it chooses
        """
        import torch

        started = time.perf_counter()
        if launch not in self.timers:
            self.timers[launch] = timer_for(self.kind, launch)
        timer = self.timers[launch]
        known = [*self.guests, *kernels.implementations(self.op.name)]
        implementation = next((i for i in known if i.name == impl), None)
        if implementation is None:
            raise Unsupported(f"there is no {impl} in this arm's source tree")
        if config is not None:
            from kernels.tuning import Tunable

            assert isinstance(implementation, Tunable)
            implementation = implementation.configured(config)
        prepared: list[Prepared] = []
        again = self.kind == "cpu" and contender in self.first_s
        spared = again and contender in self.settled_s
        spent_s = 0.0
        for operands in self.sets:
            out = None
            if not implementation.allocates:
                out = self.op.empty_output(self.sizes, self.device).fill_(float("nan"))
            first = prepared[0] if prepared else None
            prepared.append(bind(self.op, implementation, operands, out, first))
            if call and not spared:
                began = time.perf_counter()
                prepared[-1].call()
                spent_s += time.perf_counter() - began
        self.first_s[contender] = spent_s / len(self.sets) if again else math.inf
        timer.synchronize()
        # A library that was just imported may have changed it.
        torch.set_num_threads(self.threads)
        calls = [p.call for p in prepared]
        program = timer.program(calls) if call else Program(calls)
        if again:  # the first time it compiled
            program.device_s = self.settled_s.get(contender, self.first_s[contender])
        self.ready[contender] = _Ready(prepared, timer, program)
        return {
            "seconds": time.perf_counter() - started,
            "synchronises": program.synchronises,
            "source": source_of(implementation),
        }

    def turn(self, contender: str, at_least: float) -> dict[str, Any]:
        ready = self.ready[contender]
        return asdict(ready.timer.turn(ready.program, at_least))

    def output(self, contender: str, path: str, fresh: bool, which: int = 0) -> dict[str, Any]:
        """Saves the output on one of the sets: of a new call into a poisoned output, or as the timed calls
        left it, if they were so many that one was on this set. Returns the digest of the operands, which no
        call may change, and the seconds of the new call."""
        import torch

        ready = self.ready[contender]
        prepared = ready.prepared[which]
        seconds = 0.0
        if fresh or not ready.program.reached(which):
            if prepared.out is not None:
                prepared.out.fill_(float("nan"))
            started = time.perf_counter()
            ready.program.reproduce(which)
            ready.timer.synchronize()
            seconds = time.perf_counter() - started
        torch.save(prepared.result().detach().cpu().contiguous(), path)
        return {"digest": self.sets[which].digest(), "seconds": seconds}

    def digest(self) -> int:
        return self.sets[0].digest()

    def load(self, seeds: Mapping[str, Any]) -> int:
        """New live operands for all on the first set, stationary ones kept; returns the digest."""
        live = self._make(seeds).live_tensors()
        for ready in self.ready.values():
            ready.prepared[0].load(live)
        for name, tensor in live.items():
            getattr(self.sets[0], name).copy_(tensor)
        return self.sets[0].digest()

    def profile(self, contender: str) -> dict[str, Any]:
        """What ran in a call and for how long (see profile.py), of a graph in the eager calls;
        `picked`: what its library says of that, `ran`: what else is known of it (see fingerprint.py)."""
        ready = self.ready[contender]
        calls = [p.call for p in ready.prepared]
        try:
            call_s = ready.program.device_s / ready.program.calls
            profiled = profile(calls, self.kind, ready.timer.synchronize, call_s)
            ran = fingerprint(calls[0], self.kind, [kernel["name"] for kernel in profiled["kernels"]])
        finally:
            # Outputs that calls allocate are now those of the eager calls, which no replay writes.
            ready.program = ready.timer.program(calls)
        return profiled | {"picked": ready.prepared[0].picked(), "ran": ran}

    def close(self) -> None:
        self.ready.clear()
        self.sets = []
