"""Bench, inside a worker: one case's operands and the entries prepared on them.

Every public method is one request that the parent makes; arguments and answers are plain values.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import kernels
from harness.workers.child import heap
from harness.workers.child.blob import LARGE, Blob
from harness.workers.child.device import empty_cache, ready_device
from harness.workers.child.fingerprint import fingerprint
from harness.workers.child.outputs import LEAST_CALLS, OwnedOutput, Repeats, bits, distance, wrong_number
from harness.workers.child.profile import profile, start
from harness.workers.child.source_hash import source_of
from harness.workers.child.timers import timer_for
from harness.workers.child.timers.base import Program, Timer
from kernels.compose import bind
from kernels.op import Implementation, Op, Prepared, Unsupported
from kernels.operands import Operands, Seeds
from kernels.platform import available_memory

if TYPE_CHECKING:
    import torch

# Calls that are compared with each other: one that is wrong once in 20 shows among them in 98 % of runs.
REPEATS = 79
# Of them, those that follow a call on another activation: where one in 10 holds something of the call before
# it shows in 99 % of runs.
CHANGES = 45
LEAST_S = 5.0
FAR_BYTES = 9 << 30
"""Of operands whose places need more than 32 bits: so many values of bf16."""
UNSEEN, UNSEEN_S = 30, 0.7
"""Pairs of a call on activations that were never seen and one on the same: so many at most, and seconds."""

OFTEN, SELDOM = 0.5, 0.2
"""Of samples those whose timed calls read another activation: until there was one, and after it."""

# Where the first calls after preparing anew take on average no more than this many times as long as those
# that are timed, they are spared from then on.
AS_LONG = 1.1


@dataclass
class _Ready:
    """An entry: prepared once on each set of operands, with the program that samples run.

    reads: of each set where the calls read live operands. Asked for when those were loaded, so that nobody
           learns from it that one is to change
    implementation: it
    plugin: whether it is none of the suite's
    outs: of each set what the harness gave it to write to; None of a library that allocates
    elsewhere: by set, the last answer that was read and lay in other memory
    spoilt_at: steps that the program had taken when all outputs were spoiled last; None: they are not all
    """

    prepared: list[Prepared]
    reads: list[dict[str, torch.Tensor]]
    outs: list[OwnedOutput | None]
    timer: Timer
    program: Program
    implementation: Implementation
    plugin: bool
    elsewhere: dict[int, torch.Tensor] = field(default_factory=dict)
    spoilt_at: int | None = None

    @property
    def reached(self) -> list[int]:
        """Of all sets those on which samples computed since outputs were spoiled; none where nobody knows."""
        if self.spoilt_at is None:
            return []
        return self.program.reached_since(self.spoilt_at, len(self.prepared))

    def spoil(self, wild: random.Random) -> None:
        """All that answers were read from: a call that computes nothing leaves a wrong one."""
        import torch

        for which in range(len(self.outs)) if self.spoilt_at is None else self.reached:
            if (out := self.outs[which]) is not None:
                out.spoil()
        with torch.inference_mode():  # libraries return tensors made so, which nobody else may write to
            for answer in self.elsewhere.values():
                answer.data.fill_(wrong_number(wild))
        self.elsewhere.clear()
        self.timer.synchronize()
        self.spoilt_at = self.program.taken

    def reproduce(self, which: int) -> None:
        """A call on a set beside the samples."""
        self.spoilt_at = None
        self.program.reproduce(which)
        self.timer.synchronize()

    def places(self, which: int, operands: Operands, name: str) -> list[torch.Tensor]:
        """Where a live operand stands: the canonical one, and the copy that calls read, if it is another."""
        canonical, own = getattr(operands, name), self.reads[which].get(name)
        if own is None or own.data_ptr() == canonical.data_ptr():
            return [canonical]
        if self.plugin and own.dtype != canonical.dtype:
            raise TypeError(f"inputs() gives {name} as {own.dtype}, but it is {canonical.dtype}")
        return [canonical, own]

    def activations(self, sets: Sequence[Operands]) -> Iterable[torch.Tensor]:
        """Where the activations of sets stand, each place once."""
        places = [
            p for n, operands in enumerate(sets) for p in self.places(n, operands, activation_of(operands))
        ]
        return {place.data_ptr(): place for place in places}.values()

    def load(self, which: int, live: Mapping[str, torch.Tensor]) -> None:
        """Puts live operands where the calls on a set read them."""
        self.prepared[which].load(live)
        self.reads[which] = reads_of(self.prepared[which])

    def result(self, which: int) -> torch.Tensor:
        """The output of the last call on a set: the harness's own, wherever the kernel says that it is."""
        result, out = self.prepared[which].result(), self.outs[which]
        if out is not None and out.holds(result):
            return out.tensor
        self.elsewhere[which] = result
        return result


class Bench:
    """Holds the sets of operands (the first is checked; the others make calls rotate) and the entries.

    guests: implementations that no folder or plugin holds
    """

    op: Op
    sets: list[Operands]

    def __init__(self, *guests: Implementation) -> None:
        self.guests = guests
        self.ready: dict[str, _Ready] = {}
        self.checked_only = True  # what is opened, until it is moved to where calls are timed
        self.case: tuple[str, dict[str, Any], str] | None = None
        # Seconds per call that preparing anew made; and, of whom it may spare them, of those timed.
        self.first_s: dict[str, float] = {}
        self.settled_s: dict[str, float] = {}
        self.timers: dict[str, Timer] = {}
        self.repeats: dict[str, Repeats] = {}
        # The live operands that were loaded last, and the seeds of those that are in use.
        self.live: dict[str, torch.Tensor] = {}
        self.seeds: Mapping[str, Any] = {}
        self.wild = random.Random()  # of the system's entropy: nobody foresees it

    def hello(
        self, kind: str, device: str, threads: int, planned: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        self.kind, self.device, self.threads = kind, device, threads
        return ready_device(kind, device, threads, planned)

    def open(
        self,
        op: str,
        sizes: Mapping[str, Any],
        boundary: str,
        seeds: Mapping[str, Any],
        beside: Mapping[str, Any] | None = None,
    ) -> int:
        """Makes the canonical operands; the digest, of the last set, tells the parent whether they are the
        judge's. beside: of a second set, where calls rotate over both"""
        self.close()
        case = (op, dict(sizes), boundary)
        if case != self.case:
            self.case = case
            self.first_s.clear()
            self.settled_s.clear()
        self.checked_only = True
        self.op = kernels.OPS[op]
        self.sizes = self.op.sizes(sizes)
        self.boundary = boundary
        self.seeds = seeds
        self.sets = [self._make(each) for each in (seeds, beside) if each is not None]
        return self.sets[-1].digest()

    def _make(self, seeds: Mapping[str, Any]) -> Operands:
        return self.op.make(self.sizes, Seeds(**seeds), self.device, self.boundary)

    def fresh(self, mode: str, copies: int) -> None:
        """Moves the operands to fresh buffers, in `copies` sets: those that a serving step streams are
        each set's own, the others shared (`cold`: all are its own). Everybody has to be prepared again."""
        for name in self.ready:
            self._see(name)
            self._settle(name, self.ready[name].program)
        self.ready.clear()
        self.checked_only = False
        first = self.sets[0].copy()
        self.sets = [first]  # frees the others before new ones are made
        heap.give_back()
        empty_cache(self.kind)
        self.sets += [first.turned(sample, mode == "cold") for sample in range(1, copies)]

    def _settle(self, name: str, program: Program) -> None:
        """Whether the first calls after preparing it anew may be spared from now on."""
        if program.taken and self.first_s[name] <= AS_LONG * program.device_s < math.inf:
            self.settled_s[name] = program.device_s

    def prepare(
        self,
        entry: str,
        impl: str,
        launch: str,
        call: bool = True,
        config: Mapping[str, Any] | None = None,
        plugin: bool = False,
    ) -> dict[str, Any]:
        """Prepares on every set and calls each once (JIT compilers run here), on a CPU until that was seen to
        change nothing, and no second time where nothing will be timed. Returns the seconds, whether a call
        synchronises the host, and a hash of its source. Raises Unsupported where it cannot be launched so.

        call:   False spares the calls where nothing will be timed
        config: that a tunable implementation is told to use; None: it chooses
        plugin: whether it is none of the suite's, which it is not asked itself
        """
        import torch

        started = time.perf_counter()
        if launch not in self.timers:
            self.timers[launch] = timer_for(self.kind, launch)
        timer = self.timers[launch]
        known = [*self.guests, *kernels.implementations(self.op.name)]
        implementation = next((i for i in known if i.name == impl), None)
        if implementation is None:
            raise Unsupported(f"there is no {impl} in this setting's source tree")
        if config is not None:
            from kernels.tuning import Tunable

            assert isinstance(implementation, Tunable)
            implementation = implementation.configured(config)
        prepared: list[Prepared] = []
        outs: list[OwnedOutput | None] = []
        again = self.kind == "cpu" and entry in self.first_s
        spared = again and (self.checked_only or entry in self.settled_s)
        spent_s = 0.0
        for operands in self.sets:
            out = None
            if not implementation.allocates:
                out = OwnedOutput(self.op.empty_output(self.sizes, "meta"), self.device, self.wild)
                out.poison()
            outs.append(out)
            first = prepared[0] if prepared else None
            given = None if out is None else out.tensor
            prepared.append(bind(self.op, implementation, operands, given, first))
            if call and not spared:
                began = time.perf_counter()
                prepared[-1].call()
                spent_s += time.perf_counter() - began
        self.first_s[entry] = spent_s / len(self.sets) if again else math.inf
        timer.synchronize()
        # A library that was just imported may have changed it.
        torch.set_num_threads(self.threads)
        calls = [p.call for p in prepared]
        program = timer.program(calls) if call else Program(calls)
        if again:  # the first time it compiled
            program.device_s = self.settled_s.get(entry, self.first_s[entry])
        if self.kind == "cpu" and all(outs):
            program.before = [out.spoiler() for out in outs if out is not None]
        reads = [reads_of(each) for each in prepared]
        self.ready[entry] = _Ready(prepared, reads, outs, timer, program, implementation, plugin)
        return {
            "seconds": time.perf_counter() - started,
            "synchronises": program.synchronises,
            "source": source_of(implementation),
        }

    def spoil(self, entry: str) -> None:
        """Compares what samples left with what the first one did, and spoils it: before each sample, a
        request of its own, so that a sample's seconds are of its calls."""
        self._see(entry)
        self.ready[entry].spoil(self.wild)

    def _see(self, entry: str) -> None:
        ready, repeats = self.ready[entry], self.repeats.setdefault(entry, Repeats())
        for which in ready.reached:
            repeats.see(which, ready.result(which), self._copies)

    def sample(self, entry: str, at_least: float) -> dict[str, Any]:
        """A timed sample. Outputs are spoiled before its untimed call and, on a CPU, before its timed ones;
        and in some samples, drawn at random, its timed calls read another activation than all before.

        replaced: whether they did
        """
        ready = self.ready[entry]
        if ready.spoilt_at != ready.program.taken:
            self.spoil(entry)
        replaced = False

        def between() -> None:
            nonlocal replaced
            self.spoil(entry)
            replaced = self._replace(entry)

        if self.kind == "cpu":
            ready.program.after_untimed = between
        else:
            replaced = self._replace(entry)
        try:
            sample = ready.timer.sample(ready.program, at_least)
            if replaced:
                self._note_kept(entry)
            return asdict(sample) | {"replaced": replaced}
        finally:
            ready.program.after_untimed = None
            if replaced:  # whoever fails, the others' operands stand as before
                self._roll(ready, ready.activations(self.sets), -1)
                ready.spoilt_at = None

    def _replace(self, entry: str) -> bool:
        """Rolls the activation of all sets, in some samples."""
        repeats, operands = self.repeats[entry], self.sets[0]
        if not repeats.first or activation_of(operands) in without_effect(operands):
            return False
        chance = OFTEN if repeats.kept is None else SELDOM
        ready = self.ready[entry]
        return self.wild.random() < chance and self._roll(ready, ready.activations(self.sets), 1)

    def _note_kept(self, entry: str) -> None:
        """Whether timed calls left the answer to the activation that stood there before: on a set that they
        were the first to call, or on one that was called before."""
        ready, repeats = self.ready[entry], self.repeats[entry]
        for which in ready.reached:
            first = repeats.first.get(0 if self._copies else which)
            # Zeros are the answer where no expert here was chosen, whatever the activation.
            if first is not None and bool(first.any()):
                repeats.kept = bool(repeats.kept) or same_bits(ready.result(which), bits(first))

    def _roll(self, ready: _Ready, places: Iterable[torch.Tensor], columns: int) -> bool:
        """Whether that changed them."""
        changed = False
        for place in places:
            rolled = bits(place).roll(columns, -1)
            changed = changed or not same_bits(place, rolled)
            written(place, rolled.view(place.dtype))
        ready.timer.synchronize()
        return changed

    @property
    def _copies(self) -> bool:
        """Whether the sets that calls rotate over are of equal values."""
        return not self.op.turns

    def output(
        self, entry: str, which: int = 0, poison: bool = True, scribble: bool = False
    ) -> dict[str, Any]:
        """The output of a new call on one of the sets.

        poison:   it is filled with NaN before, else with a finite number
        scribble: the live operands are overwritten once the call has returned, so that no answer can be
                  computed of them later; they are restored
        output, shape, dtype: see `packed`
        digest:   of the operands, which no call may change
        seconds:  of the call; result_s: of reading the answer
        late:     whether the output changed after the call had returned
        guards:   whether nothing was written beside it
        """
        import torch

        ready = self.ready[entry]
        out = ready.outs[which]
        if out is not None:
            out.poison() if poison else out.spoil()
            ready.timer.synchronize()
        started = time.perf_counter()
        ready.reproduce(which)
        seconds = time.perf_counter() - started
        left = bits(out.tensor).clone() if out is not None else torch.empty(0)
        if scribble:
            for tensor in self.sets[which].live_tensors().values():
                tensor.zero_()
        started = time.perf_counter()
        result = ready.result(which).detach().contiguous()
        ready.timer.synchronize()
        result_s = time.perf_counter() - started
        late = out is not None and not torch.equal(bits(out.tensor), left)
        answer = packed(result)
        if scribble:
            self._put(entry, which)
        return answer | {
            "digest": self.sets[which].digest(),
            "seconds": seconds,
            "result_s": 0.0 if out is not None and out.holds(result) else result_s,
            "late": late,
            "guards": out is None or out.guards_hold(),
        }

    def far(self, entry: str) -> dict[str, Any] | None:
        """The output of a call on the same operands where their places need more than 32 bits (see
        Operands.far), prepared on those, as plain values; None where the op has no such operands, memory is
        short, or the call fails there. On a CPU only touched pages take memory; an implementation that copies
        the whole cache is stopped at a quarter of what is free."""
        import torch

        operands = None
        try:
            if self.kind != "cpu" and torch.cuda.mem_get_info(self.device)[0] < 2 * FAR_BYTES:
                return None
            operands = self.sets[0].far()
            if operands is None:
                return None
            # Other workers do the same meanwhile.
            with heap.at_most(available_memory() // 4) if self.kind == "cpu" else contextlib.nullcontext():
                return self._called_once(self.ready[entry], operands)
        except Exception as failure:
            # It is judged on the operands as they were.
            if self.kind == "cpu" or isinstance(failure, (torch.OutOfMemoryError, Unsupported)):
                return None
            raise
        finally:
            operands = None  # frees it, so that others find its memory
            empty_cache(self.kind)
            heap.trim()

    def _called_once(self, ready: _Ready, operands: Operands) -> dict[str, Any]:
        out = None
        if not ready.implementation.allocates:
            out = OwnedOutput(self.op.empty_output(self.sizes, "meta"), self.device, self.wild)
            out.poison()
        prepared = bind(self.op, ready.implementation, operands, None if out is None else out.tensor)
        prepared.call()
        ready.timer.synchronize()
        return packed(prepared.result())

    def compared(self, entry: str, seconds: float) -> dict[str, Any]:
        """What the timed calls left, and further ones, until there are REPEATS, and CHANGES of them right
        after a call on another activation, for some seconds; but LEAST_CALLS of either for up to LEAST_S.

        calls, differed: how many outputs were compared with the first, and how many had other bits
        outputs:  the first and the one farthest from it, of set 0 and of the last where sets differ in value,
                  each with its `set`; of other sets the one farthest from what set 0 gives for its operands
        kept:     whether timed calls gave an old answer to another activation
        guards:   whether nothing was written beside any output
        """
        ready = self.ready[entry]
        repeats = self.repeats.setdefault(entry, Repeats())
        count, began = len(self.sets), time.perf_counter()
        self._see(entry)
        which = 0
        # Two more where samples gave enough: the last call of a sample may always be one that computes.
        enough = max(REPEATS, repeats.calls + 2)
        changes = 0 if activation_of(self.sets[0]) in without_effect(self.sets[0]) else CHANGES

        def more() -> bool:
            calls, changed = enough - repeats.calls, changes - repeats.changed
            spent_s = time.perf_counter() - began
            if spent_s < seconds:
                return calls > 0 or changed > 0
            few = repeats.calls < LEAST_CALLS or repeats.changed < min(changes, LEAST_CALLS)
            return few and spent_s < LEAST_S

        while len(repeats.first) < (1 if self._copies else count) or more():
            # The first two are calls in a row.
            self._repeat(ready, repeats, which % count, which > 1 and repeats.changed < changes)
            which += 1
        last = count - 1
        judged = {0: repeats.first[0]} if self._copies else {s: repeats.first[s] for s in (0, last)}
        outputs = [packed(output) | {"set": which} for which, output in judged.items()]
        if repeats.farthest is not None:
            which, output = repeats.farthest
            outputs.append(packed(output) | {"set": 0 if self._copies else which})
        if not self._copies and (which := self._unlike_first(ready, repeats)):
            outputs.append(packed(repeats.first[which]) | {"set": which})
        return {
            "calls": repeats.calls,
            "differed": repeats.differed,
            "distance": repeats.distance if math.isfinite(repeats.distance) else None,
            "kept": bool(repeats.kept),
            "outputs": outputs,
            "guards": all(out is None or out.guards_hold() for out in ready.outs),
        }

    def _unlike_first(self, ready: _Ready, repeats: Repeats) -> int:
        """Of the sets between the first and the last, which are judged, the one whose output lies farthest
        from what the first set's call gives for its live operands; 0 where all have the same bits."""
        unlike = Repeats()
        if len(self.sets) < 3:
            return 0
        own = {name: tensor.clone() for name, tensor in self.sets[0].live_tensors().items()}
        try:
            for which, operands in list(enumerate(self.sets))[1:-1]:
                ready.load(0, operands.live_tensors())
                ready.spoil(self.wild)
                ready.reproduce(0)
                if not same_bits(ready.result(0), bits(repeats.first[which])):
                    unlike.note(which, repeats.first[which], ready.result(0))
        finally:
            ready.load(0, own)
            for name, tensor in own.items():
                written(getattr(self.sets[0], name), tensor)
        return unlike.farthest[0] if unlike.farthest else 0

    def _repeat(self, ready: _Ready, repeats: Repeats, which: int, changed: bool) -> None:
        """changed: whether it comes right after a call on another activation"""
        if changed:
            places = ready.places(which, self.sets[which], activation_of(self.sets[which]))
            self._roll(ready, places, 1)
            try:
                ready.reproduce(which)
            finally:
                self._roll(ready, places, -1)
            repeats.changed += 1
        ready.spoil(self.wild)
        ready.reproduce(which)
        if len(ready.program.steps) >= len(self.sets):
            repeats.see(which, ready.result(which), self._copies)
            return
        for each in range(len(self.sets)):  # a graph holds calls on all
            repeats.see(each, ready.result(each), self._copies)

    def digest(self) -> int:
        return self.sets[0].digest()

    def load(self, seeds: Mapping[str, Any], which: int = 0) -> int:
        """New live operands for all on one of the sets, stationary ones kept; returns the digest."""
        self.seeds, self.live = seeds, self._make(seeds).live_tensors()
        self._write(which)
        for entry in self.ready:
            self._put(entry, which)
        return self.sets[which].digest()

    def _write(self, which: int) -> None:
        """The loaded live operands, for whoever is prepared after this, too."""
        for name, tensor in self.live.items():
            written(getattr(self.sets[which], name), tensor)

    def _put(self, entry: str, which: int) -> None:
        """The same for one entry."""
        self.ready[entry].load(which, self.live)
        self._write(which)

    def unseen(self, entry: str) -> dict[str, Any]:
        """Calls on activations that were never seen, changed in place where the call reads them, among others
        on the same, written anew: seconds of each as `unseen` and `again`, on a CPU at most what its threads
        computed; as `stale` how far an output on a new activation lay from the next one on the same (see
        outputs.distance); and as `kept` the operands with which the output did not change. Of a plug-in every
        live one is changed, to those of other seeds: what it makes of them belongs into its calls. What was
        loaded stands again after this. (Timed calls are no measure: on a busy machine a call alone waits
        more.)"""
        ready, operands = self.ready[entry], self.sets[0]
        name = activation_of(operands)
        places = ready.places(0, operands, name)

        def call(columns: int) -> float:
            # By way of one more column and back: the same work, and the same threads awake, before either.
            for place in places:
                for shift in (columns + 1, -1):
                    written(place, bits(place).roll(shift, -1).view(place.dtype))
            ready.timer.synchronize()
            started, computed = time.perf_counter(), time.process_time()
            ready.reproduce(0)
            elapsed, computed = time.perf_counter() - started, time.process_time() - computed
            return min(elapsed, computed) if self.kind == "cpu" else elapsed

        ready.reproduce(0)
        # As where all weights are zeros. Who is surprised by a change cannot answer so.
        is_zero = not ready.result(0).any()
        call(0)
        before = bits(ready.result(0)).clone()
        seconds: tuple[list[float], list[float]] = ([], [])
        known, stale = ready.result(0).clone(), 0.0
        end = time.perf_counter() + UNSEEN_S
        while not seconds[0] or (len(seconds[0]) < UNSEEN and time.perf_counter() < end):
            # In no order that the slices of a busy machine's scheduler could fall in with.
            for new in self.wild.sample((0, 1), 2):
                seconds[new].append(call(new))
                given = ready.result(0).clone()
                if not new and not same_bits(given, bits(known)) and bool((given - known).isfinite().all()):
                    stale = max(stale, distance(given, known))
                known = given
        again, unseen = seconds

        def stays(before: torch.Tensor) -> bool:
            """Zeros are no other answer: to valid values no right kernel gives them."""
            return not is_zero and (same_bits(ready.result(0), before) or not ready.result(0).any())

        idle = without_effect(operands)
        kept = [name] if name not in idle and stays(before) else []
        for other, values in self._others().items() if ready.plugin else ():
            places = ready.places(0, operands, other)
            if other in {name, *idle} or same_bits(values, bits(places[0])):
                continue
            before = bits(ready.result(0)).clone()
            for place in places:
                written(place, values)
            ready.timer.synchronize()
            ready.reproduce(0)
            if stays(before):
                kept.append(other)
        if self.live:
            self._put(entry, 0)
        return {"unseen": unseen, "again": again, "kept": kept, "stale": stale}

    def _others(self) -> dict[str, torch.Tensor]:
        """Live operands of other values than those in use, as valid as they."""
        return self._make({**self.seeds, "live": Seeds(**self.seeds).live + 1}).live_tensors()

    def start_profiler(self) -> None:
        start(self.kind)

    def profile(self, entry: str) -> dict[str, Any]:
        """What ran in a call and for how long (see profile.py), of a graph in the eager calls;
        `picked`: what its library says of that, `ran`: what else is known of it (see fingerprint.py)."""
        ready = self.ready[entry]
        calls = [p.call for p in ready.prepared]
        try:
            call_s = ready.program.device_s / ready.program.calls
            profiled = profile(calls, self.kind, ready.timer.synchronize, call_s)
            ran = fingerprint(calls[0], self.kind, [kernel["name"] for kernel in profiled["kernels"]])
        finally:
            # Outputs that calls allocate are now those of the eager calls, which no replay writes.
            ready.program, ready.spoilt_at = ready.timer.program(calls), None
        return profiled | {"picked": ready.prepared[0].picked(), "ran": ran}

    def close(self) -> None:
        self.ready.clear()
        self.repeats.clear()
        self.live = {}
        self.sets = []
        empty_cache(self.kind)


def packed(output: torch.Tensor) -> dict[str, Any]:
    """An output for the judge: `output` in bytes, or as a Blob where it is large, `shape` and `dtype`."""
    whole = output.detach().contiguous()
    if whole.nbytes >= LARGE and hasattr(os, "memfd_create"):  # Linux
        data: bytes | Blob = Blob.of(bits(whole).flatten())
    else:
        data = bits(whole).flatten().cpu().numpy().tobytes()
    return {"output": data, "shape": tuple(whole.shape), "dtype": str(whole.dtype).removeprefix("torch.")}


def reads_of(prepared: Prepared) -> dict[str, torch.Tensor]:
    """Where its calls read live operands; older commits can tell that only as a producer is told."""
    return dict(getattr(prepared, "reads", prepared.inputs)())


def same_bits(output: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether an output has the bits of another one, given as integers."""
    import torch

    return torch.equal(bits(output).to(known.device), known)


def written(place: torch.Tensor, values: torch.Tensor) -> None:
    """In place, behind the version that tells autograd, and whoever else asks, of such writes."""
    place.data.copy_(values)


def without_effect(operands: Operands) -> frozenset[str]:
    """Live operands that the output does not depend on; older commits name none."""
    return getattr(operands, "without_effect", frozenset())


def activation_of(operands: Operands) -> str:
    """The live operand that every call reads whole: the first one that the output depends on, if any."""
    live, idle = [*operands.live_tensors()], without_effect(operands)
    return next((name for name in live if name not in idle), live[0])
