"""Inside a worker: one case's operands and the contenders prepared on them.

Every public method is one request that the parent makes; arguments and answers are plain values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import kernels
from harness.machine import cpu_threads
from harness.workers.child.fingerprint import fingerprint
from harness.workers.child.profile import profile
from harness.workers.child.source_hash import source_of
from harness.workers.child.timers import timer_for
from harness.workers.child.timers.base import Program, Timer
from kernels.compose import bind
from kernels.op import Implementation, Op, Prepared, Unsupported
from kernels.operands import Operands, Seeds
from kernels.triton_runtime import target_of


@dataclass
class _Seated:
    """A contender that is ready: prepared once on each set of operands, with the program that turns run."""

    prepared: list[Prepared]
    timer: Timer
    program: Program


class Bench:
    """Holds the sets of operands (the first is checked; the others make calls rotate) and who sits.

    guests: implementations that no folder or plugin holds
    """

    op: Op
    sets: list[Operands]

    def __init__(self, *guests: Implementation) -> None:
        self.guests = guests
        self.seated: dict[str, _Seated] = {}
        self.timers: dict[str, Timer] = {}

    def hello(self, kind: str, device: str, threads: int) -> dict[str, Any]:
        """Readies the device; fails where this torch cannot reach it. `pinned`: the CPU that each thread is
        bound to, or why none is; `target`: what configurations are chosen for."""
        import torch

        self.kind, self.device, self.threads = kind, device, threads
        torch.set_num_threads(threads)
        if kind != "cpu":
            if not torch.cuda.is_available():
                raise RuntimeError(f"torch {torch.__version__} sees no GPU; {device} needs its {kind} build")
            torch.cuda.set_device(device)
        pinned = cpu_threads.pinned(threads) if kind == "cpu" else "no: the device computes"
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "pinned": pinned,
            "target": asdict(target_of(torch.device(device))),
        }

    def open(self, op: str, sizes: Mapping[str, Any], boundary: str, seeds: Mapping[str, int]) -> int:
        """Makes the canonical operands; the digest tells the parent whether they are the judge's."""
        self.close()
        self.op = kernels.OPS[op]
        self.sizes = self.op.sizes(sizes)
        self.boundary = boundary
        self.sets = [self._make(seeds)]
        return self.sets[0].digest()

    def _make(self, seeds: Mapping[str, int]) -> Operands:
        return self.op.make(self.sizes, Seeds(**seeds), self.device, self.boundary)

    def fresh(self, mode: str, copies: int) -> None:
        """Moves the operands to fresh buffers, in `copies` sets: those that a serving step streams are
        each set's own, the others shared (`cold`: all are its own). Everybody has to be prepared again."""
        self.seated.clear()
        first = self.sets[0].copy()
        self.sets = [first, *(first.turned(turn, mode == "cold") for turn in range(1, copies))]

    def prepare(
        self,
        contender: str,
        impl: str,
        launch: str,
        call: bool = True,
        config: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Prepares on every set and calls each once (JIT compilers run here). Returns the seconds,
        whether a call synchronises the host, and a hash of its source. Raises Unsupported where a call
        cannot be launched so.

        call:   False spares the calls where nothing will be timed
        config: that a tunable implementation is told to use; None: it chooses
        """
        with cpu_threads.released():
            return self._prepare(contender, impl, launch, call, config)

    def _prepare(
        self, contender: str, impl: str, launch: str, call: bool, config: Mapping[str, Any] | None
    ) -> dict[str, Any]:
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
            implementation = implementation.configured(config)
        prepared: list[Prepared] = []
        for operands in self.sets:
            out = None
            if not implementation.allocates:
                out = self.op.empty_output(self.sizes, self.device).fill_(float("nan"))
            first = prepared[0] if prepared else None
            prepared.append(bind(self.op, implementation, operands, out, first))
            if call:
                prepared[-1].call()
        timer.synchronize()
        # A library that was just imported may have changed it.
        torch.set_num_threads(self.threads)
        calls = [p.call for p in prepared]
        program = timer.program(calls) if call else Program(calls)
        self.seated[contender] = _Seated(prepared, timer, program)
        return {
            "seconds": time.perf_counter() - started,
            "synchronises": program.synchronises,
            "source": source_of(implementation),
        }

    def turn(self, contender: str, at_least: float) -> dict[str, Any]:
        seated = self.seated[contender]
        return asdict(seated.timer.turn(seated.program, at_least))

    def output(self, contender: str, path: str, fresh: bool, which: int = 0) -> dict[str, Any]:
        """Saves the output on one of the sets: of a new call into a poisoned output, or as the timed calls
        left it. Returns the digest of the operands, which no call may change, and the seconds of the new
        call."""
        import torch

        seated = self.seated[contender]
        prepared = seated.prepared[which]
        seconds = 0.0
        if fresh:
            if prepared.out is not None:
                prepared.out.fill_(float("nan"))
            started = time.perf_counter()
            seated.program.reproduce(which)
            seated.timer.synchronize()
            seconds = time.perf_counter() - started
        torch.save(prepared.result().detach().cpu().contiguous(), path)
        return {"digest": self.sets[which].digest(), "seconds": seconds}

    def digest(self) -> int:
        return self.sets[0].digest()

    def load(self, seeds: Mapping[str, int]) -> int:
        """New live operands for all on the first set, stationary ones kept; returns the digest."""
        live = self._make(seeds).live_tensors()
        for seated in self.seated.values():
            seated.prepared[0].load(live)
        for name, tensor in live.items():
            getattr(self.sets[0], name).copy_(tensor)
        return self.sets[0].digest()

    def profile(self, contender: str) -> dict[str, Any]:
        """What ran in a call and for how long (see profiling.py), of a graph in the eager calls;
        `picked`: what its library says of that, `ran`: what else is known of it (see identity.py)."""
        seated = self.seated[contender]
        calls = [p.call for p in seated.prepared]
        try:
            found = profile(calls, self.kind, seated.timer.synchronize)
            ran = fingerprint(calls[0], self.kind, [kernel["name"] for kernel in found["kernels"]])
        finally:
            # Outputs that calls allocate are now those of the eager calls, which no replay writes.
            seated.program = seated.timer.program(calls)
        return found | {"picked": seated.prepared[0].picked(), "ran": ran}

    def close(self) -> None:
        self.seated.clear()
        self.sets = []
