"""Bench, inside a worker: the operands of one case, and the entries that are prepared on them.

Each public method is one request of the parent process; arguments and answers are plain values.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import kernels
from harness.workers.child import device as devices
from harness.workers.child.device import empty_cache
from harness.workers.child.outputs import LARGE, LEAST_CALLS, SPOILT, Blob, OwnedOutput, Repeats, bits
from harness.workers.child.profile import fingerprint, profile, source_of, start
from harness.workers.child.timers import Program, Timer, timer_for
from kernels.compose import bind
from kernels.op import Implementation, Op, Prepared, Unsupported
from kernels.operands import Operands, Seeds
from kernels.platform import available_memory
from shapes.case import Case

if TYPE_CHECKING:
    import torch

REPEATS = 79  # calls that are compared: one that is wrong once in 20 is found among them in 98 % of runs

CHANGES = 45
"""How many of them follow a call on another activation: a kernel that keeps something of the call before,
once in 10 calls, is found in 99 % of runs."""

LEAST_S = 1.5  # LEAST_CALLS are made however little time there is, but for no longer than this
FAR_BYTES = 9 << 30  # bytes of operands that hold more than 2^32 values, in bf16

AS_LONG = 1.1  # first calls after preparing anew that take at most so many times a timed call are left out


@dataclass
class _Ready:
    """An entry that is prepared once on each set of operands, with the program that its samples run."""

    prepared: list[Prepared]  # for each set
    reads: list[dict[str, torch.Tensor]]  # for each set, where the calls read live operands
    outs: list[OwnedOutput | None]  # for each set; None for a library that allocates its output
    timer: Timer
    program: Program
    implementation: Implementation
    plugin: bool  # whether the implementation is a user's own and not the suite's
    returns: bool  # whether a call returned a tensor, which is not read if there is an output to write to
    filled_at: int | None = None  # steps taken when all outputs were filled; None after a call beside them

    @property
    def computed(self) -> list[int]:
        """The sets that samples computed since outputs were filled; empty where that is not known."""
        if self.filled_at is None:
            return []
        return self.program.computed_since(self.filled_at, len(self.prepared))

    def fill(self) -> None:
        """Fills the outputs that calls wrote, so that a call that computes nothing leaves a wrong one."""
        written_to = range(len(self.outs)) if self.filled_at is None else self.computed
        for which in written_to:
            if out := self.outs[which]:
                out.fill(SPOILT)
        self.timer.synchronize()
        self.filled_at = self.program.steps_taken

    def call_once(self, which: int) -> None:
        """Makes a call on a set outside the samples."""
        self.filled_at = None
        steps = self.program.steps
        steps[which % len(steps)]()
        self.timer.synchronize()

    def result(self, which: int) -> torch.Tensor:
        return self.prepared[which].result()

    def places(self, which: int, operands: Operands, name: str) -> list[torch.Tensor]:
        """Where a live operand is stored: the canonical tensor, and the copy that calls read, if any."""
        canonical = getattr(operands, name)
        copy = self.reads[which].get(name)
        if copy is None or copy.data_ptr() == canonical.data_ptr():
            return [canonical]
        if self.plugin and copy.dtype != canonical.dtype:
            raise TypeError(f"inputs() gives {name} as {copy.dtype}, but it is {canonical.dtype}")
        return [canonical, copy]

    def load(self, which: int, live: Mapping[str, torch.Tensor]) -> None:
        self.prepared[which].load(live)
        self.reads[which] = reads_of(self.prepared[which])


class Bench(devices.OnDevice):
    """The sets of operands (the first is checked; the others make calls rotate) and the prepared entries."""

    op: Op
    sets: list[Operands]

    def __init__(self, *unlisted: Implementation) -> None:
        """unlisted: implementations that are in no folder and no plug-in"""
        self.unlisted = unlisted
        self.ready: dict[str, _Ready] = {}
        self.checked_only = True  # whether the operands were not yet moved to where calls are timed
        self.case: Case | None = None
        self.first_s: dict[str, float] = {}  # seconds of a first call after preparing anew, by entry
        self.settled_s: dict[str, float] = {}  # seconds of a timed call, where first calls may be left out
        self.returns: set[str] = set()  # entries whose first call returned a tensor
        self.timers: dict[str, Timer] = {}
        self.repeats: dict[str, Repeats] = {}
        self.live: dict[str, torch.Tensor] = {}  # the live operands that were loaded last
        self.seeds: Mapping[str, Any] = {}  # the seeds of the operands in use

    def table(self, op: str, impl: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a row's EngineTable. The engine is imported into this process."""
        from kernels.engine_tuning import EngineTuned

        row = next(row for row in kernels.implementations(op) if row.name == impl)
        assert isinstance(row, EngineTuned)
        return asdict(row.engine_table(kernels.OPS[op].sizes(sizes)))

    # Operands

    def open(self, case: Case, seeds: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> int:
        """Makes the canonical operands, with `beside` a second set. Returns the digest of the last set, from
        which the parent knows whether they equal the judge's."""
        self.close()
        if case != self.case:
            self.case = case
            self.first_s.clear()
            self.settled_s.clear()
        self.checked_only = True
        self.op = kernels.OPS[case.op]
        self.sizes = self.op.sizes(case.sizes)
        self.boundary = case.boundary
        self.seeds = seeds
        self.sets = [self._make(seeds)]
        if beside is not None:
            self.sets.append(self._make(beside))
        return self.sets[-1].digest()

    def _make(self, seeds: Mapping[str, Any]) -> Operands:
        return self.op.make(self.sizes, Seeds(**seeds), self.device, self.boundary)

    def fresh(self, mode: str, copies: int) -> None:
        """Moves the operands to fresh buffers, in `copies` sets. Each set has its own copy of the operands
        that a serving step streams and shares the others; in `cold` mode it has its own copy of all. Every
        entry has to be prepared again."""
        for name in self.ready:  # a loop over items() would keep the last _Ready, and so its memory, alive
            self._see(name)
            self._settle(name, self.ready[name].program)
        self.ready.clear()
        self.checked_only = False
        first = self.sets[0].copy()
        self.sets = [first]  # frees the other sets before new ones are made
        devices.give_back_heap()
        empty_cache(self.kind)
        self.sets += [first.turned(number, mode == "cold") for number in range(1, copies)]

    def _settle(self, name: str, program: Program) -> None:
        """Notes whether the first calls after preparing an entry anew may be left out from now on."""
        if program.steps_taken and self.first_s[name] <= AS_LONG * program.device_s < math.inf:
            self.settled_s[name] = program.device_s

    def digest(self) -> int:
        return self.sets[0].digest()

    def load(self, seeds: Mapping[str, Any], which: int = 0) -> int:
        """Loads new live operands for all entries on one of the sets. Returns the set's digest."""
        self.seeds = seeds
        self.live = self._make(seeds).live_tensors()
        self._put([], which)  # also for entries that are prepared later
        self._put(self.ready, which)
        return self.sets[which].digest()

    def _put(self, entries: Iterable[str], which: int) -> None:
        """Puts the loaded operands where the calls of these entries read them, and into the set itself."""
        for entry in entries:
            self.ready[entry].load(which, self.live)
        for name, tensor in self.live.items():
            written(getattr(self.sets[which], name), tensor)

    # Entries

    def prepare(
        self,
        entry: str,
        impl: str,
        launch: str,
        call: bool = True,
        config: Mapping[str, Any] | None = None,
        plugin: bool = False,
    ) -> dict[str, Any]:
        """Prepares an entry on every set and, unless `call` is False, calls it once on each, which runs JIT
        compilers. On a CPU a later preparation leaves the calls out where nothing will be timed on these
        operands, or where first calls took no longer than timed ones (AS_LONG). Returns the seconds that this
        took, whether a call synchronises the host, and a hash of the source. Raises Unsupported where the
        entry cannot be launched in this mode."""
        import torch

        started = time.perf_counter()
        if launch not in self.timers:
            self.timers[launch] = timer_for(self.kind, launch)
        timer = self.timers[launch]
        implementation = self._implementation(impl, config)
        prepared: list[Prepared] = []
        outs: list[OwnedOutput | None] = []
        again = self.kind == "cpu" and entry in self.first_s
        left_out = again and (self.checked_only or entry in self.settled_s)
        spent_s = 0.0
        for operands in self.sets:
            out = self._output_for(implementation)
            outs.append(out)
            first = prepared[0] if prepared else None
            place = None if out is None else out.tensor
            prepared.append(bind(self.op, implementation, operands, place, first))
            if call and not left_out:
                began = time.perf_counter()
                # `Prepared.call` returns None; that of a subclass may return a tensor by mistake.
                returned: object = prepared[-1].call()  # type: ignore[func-returns-value]
                spent_s += time.perf_counter() - began
                if isinstance(returned, torch.Tensor):
                    self.returns.add(entry)
        self.first_s[entry] = spent_s / len(self.sets) if again else math.inf
        timer.synchronize()
        # A library that was just imported may have changed it.
        torch.set_num_threads(self.threads)
        calls = [p.call for p in prepared]
        program = timer.program(calls) if call else Program(calls)
        if again:  # the first preparation compiled, so that its seconds say nothing
            program.device_s = self.settled_s.get(entry, self.first_s[entry])
        reads = [reads_of(each) for each in prepared]
        returns = entry in self.returns
        self.ready[entry] = _Ready(prepared, reads, outs, timer, program, implementation, plugin, returns)
        return {
            "seconds": time.perf_counter() - started,
            "synchronises": program.synchronises,
            "source": source_of(implementation),
        }

    def _implementation(self, name: str, config: Mapping[str, Any] | None) -> Implementation:
        known = [*self.unlisted, *kernels.implementations(self.op.name)]
        implementation = next((i for i in known if i.name == name), None)
        if implementation is None:
            raise Unsupported(f"there is no {name} in this setting's source tree")
        if config is not None:
            from kernels.tuning import Tunable

            assert isinstance(implementation, Tunable)
            implementation = implementation.configured(config)
        return implementation

    def _output_for(self, implementation: Implementation) -> OwnedOutput | None:
        """An output filled with NaN; None for an implementation that allocates its own."""
        if implementation.allocates:
            return None
        out = OwnedOutput(self.op.empty_output(self.sizes, "meta"), self.device)
        out.fill()
        return out

    # Samples

    def inspect(self, entry: str) -> None:
        """Compares the outputs that the last sample left with the first ones, and fills them again. The
        parent asks for it before each sample, so that a sample's seconds contain nothing but its calls."""
        self._see(entry)
        self.ready[entry].fill()

    def _see(self, entry: str) -> None:
        ready = self.ready[entry]
        repeats = self.repeats.setdefault(entry, Repeats())
        for which in ready.computed:
            repeats.see(which, ready.result(which), self._copies)

    @property
    def _copies(self) -> bool:
        """Whether the sets that calls rotate over hold equal values."""
        return not self.op.turns

    def sample(self, entry: str, at_least: float) -> dict[str, Any]:
        """Times a sample of about `at_least` seconds. Returns the fields of `timers.Sample`."""
        ready = self.ready[entry]
        if ready.filled_at != ready.program.steps_taken:
            self.inspect(entry)
        return asdict(ready.timer.sample(ready.program, at_least))

    # Checks

    def output(self, entry: str, which: int = 0, fill: float = math.nan) -> dict[str, Any]:
        """The output of a new call on one of the sets, which is filled with `fill` before.

        output, shape, dtype: see `packed`
        digest:  of the operands, which no call may change
        seconds: of the call
        late:    whether the output changed after the call had returned
        guards:  whether nothing was written beside it
        ignored: whether the output is unwritten and the call returned a tensor, which nothing reads
        """
        import torch

        ready = self.ready[entry]
        out = ready.outs[which]
        if out is not None:
            out.fill(fill)
            ready.timer.synchronize()
        started = time.perf_counter()
        ready.call_once(which)
        seconds = time.perf_counter() - started
        left = bits(out.tensor).clone() if out is not None else torch.empty(0)
        result = ready.result(which)
        wanted = self.op.empty_output(self.sizes, "meta").dtype
        if (ready.plugin or self.unlisted) and result.dtype != wanted:
            from kernels.op import named  # older commits lack it

            raise TypeError(f"{named(ready.implementation)} gave {result.dtype}, and has to give {wanted}")
        answer = packed(result)
        ready.timer.synchronize()
        return answer | {
            "digest": self.sets[which].digest(),
            "seconds": seconds,
            "late": out is not None and not same_bits(out.tensor, left),
            "guards": out is None or out.guards_hold(),
            "ignored": ready.returns and out is not None and bool(out.tensor.isnan().all()),
        }

    def far(self, entry: str) -> dict[str, Any] | None:
        """The output of a call on the same values at offsets that need more than 32 bits (see Operands.far).
        None where the op has no such operands, memory is short, the implementation does not support them, or
        the call fails on a CPU; on a GPU other errors are raised. On a CPU only touched pages take memory; an
        implementation that copies the whole cache is stopped at a quarter of the free memory."""
        import torch

        operands = None
        try:
            if self.kind != "cpu" and torch.cuda.mem_get_info(self.device)[0] < 2 * FAR_BYTES:
                return None
            operands = self.sets[0].far()
            if operands is None:
                return None
            if self.kind != "cpu":
                return self._called_once(self.ready[entry], operands)
            # Other workers do the same at the same time.
            with devices.memory_at_most(available_memory() // 4):
                return self._called_once(self.ready[entry], operands)
        except Exception as failure:
            # The entry is judged on the operands as they were.
            if self.kind == "cpu" or isinstance(failure, (torch.OutOfMemoryError, Unsupported)):
                return None
            raise
        finally:
            operands = None  # frees the memory for others
            empty_cache(self.kind)
            devices.trim_heap()

    def _called_once(self, ready: _Ready, operands: Operands) -> dict[str, Any]:
        out = self._output_for(ready.implementation)
        prepared = bind(self.op, ready.implementation, operands, None if out is None else out.tensor)
        prepared.call()
        ready.timer.synchronize()
        return packed(prepared.result())

    def compared(self, entry: str, seconds: float) -> dict[str, Any]:
        """Compares the outputs that timed calls left, and those of further calls, with the first output: up
        to REPEATS calls, of which CHANGES follow a call on another activation, for `seconds` seconds.
        LEAST_CALLS of either are made for up to LEAST_S, and one call on another activation in any case.

        calls, differed: how many outputs were compared, and how many of them had other bits
        distance: of the farthest of them; None if it is not finite
        outputs: for the judge, each with its `set`: the first and the farthest output of set 0, also of the
                 last set where sets differ in value
        kept:    whether a call gave the old answer to another activation
        guards:  whether nothing was written beside any output
        """
        ready = self.ready[entry]
        repeats = self.repeats.setdefault(entry, Repeats())
        count = len(self.sets)
        began = time.perf_counter()
        self._see(entry)
        wanted_first = 1 if self._copies else count
        # Two more calls even where samples gave enough outputs: a sample hides a call that computes nothing
        # where another call on the same set wrote the output.
        wanted = max(REPEATS, repeats.calls + 2)
        idle = without_effect(self.sets[0])
        changes = 0 if activation_of(self.sets[0]) in idle else CHANGES
        made = 0
        while True:
            spent_s = time.perf_counter() - began
            if spent_s < seconds:
                more = repeats.calls < wanted or repeats.changed < changes
            else:
                few = repeats.calls < LEAST_CALLS or repeats.changed < min(changes, LEAST_CALLS)
                more = (few and spent_s < LEAST_S) or (changes > 0 and repeats.changed == 0)
            if len(repeats.first) >= wanted_first and not more:
                break
            # The first two calls are made in a row.
            changed = made > 1 and repeats.changed < changes
            self._repeat(ready, repeats, made % count, changed)
            made += 1
        judged = {0} if self._copies else {0, count - 1}
        outputs = [packed(repeats.first[which]) | {"set": which} for which in sorted(judged)]
        if repeats.farthest is not None:
            which, output = repeats.farthest
            outputs.append(packed(output) | {"set": 0 if self._copies else which})
        return {
            "calls": repeats.calls,
            "differed": repeats.differed,
            "distance": repeats.distance if math.isfinite(repeats.distance) else None,
            "kept": repeats.kept,
            "outputs": outputs,
            "guards": all(out is None or out.guards_hold() for out in ready.outs),
        }

    def _repeat(self, ready: _Ready, repeats: Repeats, which: int, changed: bool) -> None:
        """Makes one call that is compared. changed: right before it, a call on another activation must give
        another output"""
        if changed:
            places = ready.places(which, self.sets[which], activation_of(self.sets[which]))
            is_other = _roll(places, 1)
            ready.timer.synchronize()
            try:
                ready.call_once(which)
                known = repeats.first.get(0 if self._copies else which)
                # An output of zeros need not change: no expert of this rank may have been chosen.
                if is_other and known is not None and bool(known.any()):
                    repeats.kept = repeats.kept or same_bits(ready.result(which), bits(known))
            finally:
                _roll(places, -1)
                ready.timer.synchronize()
            repeats.changed += 1
        ready.fill()
        ready.call_once(which)
        is_graph = len(ready.program.steps) < len(self.sets)  # it holds calls on all sets
        called = range(len(self.sets)) if is_graph else [which]
        for number in called:
            repeats.see(number, ready.result(number), self._copies)

    def unread(self, entry: str) -> list[str]:
        """The live operands that calls do not read: the output stays as it was when other valid values are
        written where they are stored. Afterwards the loaded operands are in place again."""
        ready = self.ready[entry]
        operands = self.sets[0]
        ready.call_once(0)
        if not ready.result(0).any():  # for example if all weights are zero
            return []
        unread = []
        others = self._make({**self.seeds, "live": Seeds(**self.seeds).live + 1}).live_tensors()
        for name, values in others.items():
            places = ready.places(0, operands, name)
            if name in without_effect(operands) or same_bits(values, bits(places[0])):
                continue
            before = bits(ready.result(0)).clone()
            for place in places:
                written(place, values)
            ready.timer.synchronize()
            ready.call_once(0)
            if same_bits(ready.result(0), before):
                unread.append(name)
        if self.live:
            self._put([entry], 0)
        return unread

    # What ran

    def start_profiler(self) -> None:
        start(self.kind)

    def profile(self, entry: str) -> dict[str, Any]:
        """What ran in a call and for how long (see `profile`), of a graph in the eager calls. `picked`: what
        the library says of its choice; `ran`: what else identifies the code (see `fingerprint`)."""
        ready = self.ready[entry]
        calls = [p.call for p in ready.prepared]
        try:
            call_s = ready.program.device_s / ready.program.calls_per_step
            profiled = profile(calls, self.kind, ready.timer.synchronize, call_s)
            ran = fingerprint(calls[0], self.kind, [kernel["name"] for kernel in profiled["kernels"]])
        finally:
            # Outputs that calls allocate are now those of the eager calls, which no replay writes.
            ready.program = ready.timer.program(calls)
            ready.filled_at = None
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
    """Where the calls read live operands. Kernels of older commits have `inputs` only."""
    return dict(getattr(prepared, "reads", prepared.inputs)())


def same_bits(output: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether an output has the bits of another one, which is given as integers."""
    import torch

    return torch.equal(bits(output).to(known.device), known)


def written(place: torch.Tensor, values: torch.Tensor) -> None:
    """Writes in place without counting it in autograd's version, as an engine's kernels do."""
    place.data.copy_(values)


def _roll(places: Sequence[torch.Tensor], columns: int) -> bool:
    """Rolls the last dimension of each tensor in place. Returns whether that changed any value."""
    changed = False
    for place in places:
        rolled = bits(place).roll(columns, -1)
        changed = changed or not same_bits(place, rolled)
        written(place, rolled.view(place.dtype))
    return changed


def without_effect(operands: Operands) -> frozenset[str]:
    """The live operands that the output does not depend on. Older commits name none."""
    return getattr(operands, "without_effect", frozenset())


def activation_of(operands: Operands) -> str:
    """The live operand that every call reads as a whole: the first that the output depends on, if any."""
    live = list(operands.live_tensors())
    with_effect = [name for name in live if name not in without_effect(operands)]
    return with_effect[0] if with_effect else live[0]
