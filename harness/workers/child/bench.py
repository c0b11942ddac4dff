"""Bench, inside a worker: the operands of one case, and the entries that are prepared on them. Each public
method is one request of the parent process; arguments and answers are plain values."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import kernels
from harness.files import finite
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

COMPARED_CALLS = 79
"""So many outputs of an entry are compared: they show an error in one call of 20 in 98 % of runs."""
CHANGED_CALLS = 45
"""How many of these calls follow a call on another activation. A kernel that keeps something of the call
before, in one call of 10, is found in 99 % of runs."""
LEAST_S = 1.5  # seconds of comparing after which not even LEAST_CALLS outputs are waited for
FAR_BYTES = 9 << 30  # bytes of operands that hold more than 2^32 values, in bf16
AS_LONG = 1.1
"""On a CPU the first calls after preparing again are left out if one takes at most AS_LONG timed calls."""


@dataclass
class _PreparedEntry:
    """An entry that is prepared on each set of operands. Each list has an element for each `set_index`."""

    on_set: list[Prepared]
    reads: list[dict[str, torch.Tensor]]  # the tensors in which calls read live operands, by operand
    outs: list[OwnedOutput | None]  # None for a library that allocates its output
    timer: Timer
    program: Program  # the calls on all sets, as samples make them
    implementation: Implementation
    is_plugin: bool  # whether the implementation is a user's own and not the suite's
    returns_tensor: bool  # whether a call returned a tensor; it is not read where `outs` has an output
    filled_at: int | None = None
    """`program.steps_taken` when `fill` was last called: the outputs of later steps are compared. None before
    the first `fill`, and after `call_once`: then no output is that of a sample."""

    @property
    def computed_sets(self) -> list[int]:
        """The sets whose outputs samples wrote since `fill`."""
        if self.filled_at is None:
            return []
        return self.program.computed_since(self.filled_at, len(self.on_set))

    def fill(self) -> None:
        """Fills outputs that may have been written since with SPOILT, so that an unwritten one is wrong."""
        written_sets = range(len(self.outs)) if self.filled_at is None else self.computed_sets
        for set_index in written_sets:
            if out := self.outs[set_index]:
                out.fill(SPOILT)
        self.timer.synchronize()
        self.filled_at = self.program.steps_taken

    def call_once(self, set_index: int) -> None:
        """Makes a call on a set, outside the samples. A graph is a single step, which calls on all sets."""
        self.filled_at = None
        steps = self.program.steps
        steps[set_index % len(steps)]()
        self.timer.synchronize()

    def result(self, set_index: int) -> torch.Tensor:
        return self.on_set[set_index].result()

    def places(self, set_index: int, operands: Operands, name: str) -> list[torch.Tensor]:
        """Where a live operand is stored: the canonical tensor, and the copy that calls read, if any. Raises
        TypeError where a plug-in's copy has another dtype."""
        canonical = getattr(operands, name)
        copy = self.reads[set_index].get(name)
        if copy is None or copy.data_ptr() == canonical.data_ptr():
            return [canonical]
        if self.is_plugin and copy.dtype != canonical.dtype:
            raise TypeError(f"inputs() gives {name} as {copy.dtype}, but it is {canonical.dtype}")
        return [canonical, copy]

    def load(self, set_index: int, live: Mapping[str, torch.Tensor]) -> None:
        self.on_set[set_index].load(live)
        self.reads[set_index] = reads_of(self.on_set[set_index])


class Bench(devices.OnDevice):
    """The sets of operands that calls rotate over, and the entries that are prepared on them."""

    op: Op
    sets: list[Operands]

    def __init__(self, *unlisted: Implementation) -> None:
        """unlisted: implementations that are in no folder and no plug-in"""
        self.unlisted = unlisted
        self.prepared: dict[str, _PreparedEntry] = {}  # by entry
        self.are_timed = False  # whether calls on these operands are timed, and not only checked
        self.case: Case | None = None
        # By entry, on a CPU: seconds of a call in the last preparation; infinite for the first: it compiles.
        self.first_call_s: dict[str, float] = {}
        # The seconds of a timed call, for entries whose calls in a preparation took about as long (AS_LONG).
        # They are settled: later preparations make no calls.
        self.settled_call_s: dict[str, float] = {}
        self.returning: set[str] = set()  # entries whose calls returned a tensor
        self.timers: dict[str, Timer] = {}  # by launch mode
        self.repeats = defaultdict[str, Repeats](Repeats)  # by entry
        self.live: dict[str, torch.Tensor] = {}  # the live operands that were loaded last
        self.seeds: Mapping[str, Any] = {}  # of the operands in use

    def table(self, op: str, impl: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of an implementation's EngineTable. Its engine is imported into this process."""
        from kernels.engine_tuning import EngineTuned

        row = next(row for row in kernels.implementations(op) if row.name == impl)
        assert isinstance(row, EngineTuned)
        return asdict(row.engine_table(kernels.OPS[op].sizes(sizes)))

    # Operands

    def open(
        self, case: Case, seeds: Mapping[str, Any], second_seeds: Mapping[str, Any] | None = None
    ) -> int:
        """Makes one or two sets of operands of a case from seeds. Returns the digest of the last."""
        self.close()
        if case != self.case:
            self.case = case
            self.first_call_s.clear()
            self.settled_call_s.clear()
        self.are_timed = False
        self.op = kernels.OPS[case.op]
        self.sizes = self.op.sizes(case.sizes)
        self.boundary = case.boundary
        self.seeds = seeds
        self.sets = [self._make(seeds)]
        if second_seeds is not None:
            self.sets.append(self._make(second_seeds))
        return self.sets[-1].digest()

    def _make(self, seeds: Mapping[str, Any]) -> Operands:
        return self.op.make(self.sizes, Seeds(**seeds), self.device, self.boundary)

    def fresh(self, mode: str, copies: int) -> None:
        """Moves the operands to fresh buffers, in `copies` sets. Entries have to be prepared again. In `cold`
        mode each set has a copy of all operands, else only of those that a serving step streams."""
        for name in self.prepared:  # a loop over items() would keep the last entry, and its memory, alive
            self._compare_computed(name)
            self._note_settled(name)
        self.prepared.clear()
        self.are_timed = True
        first = self.sets[0].copy()
        self.sets = [first]  # frees the other sets before new ones are made
        devices.give_back_heap()
        empty_cache(self.kind)
        self.sets += [first.turned(number, mode == "cold") for number in range(1, copies)]

    def _note_settled(self, name: str) -> None:
        """Notes an entry that is settled (see `settled_call_s`)."""
        program = self.prepared[name].program
        was_timed = program.steps_taken > 0 and program.device_s < math.inf
        if was_timed and self.first_call_s[name] <= AS_LONG * program.device_s:
            self.settled_call_s[name] = program.device_s

    def digest(self) -> int:
        return self.sets[0].digest()

    def load(self, seeds: Mapping[str, Any], set_index: int = 0) -> int:
        """Loads new live operands on one of the sets, for all entries. Returns the set's digest."""
        self.seeds = seeds
        self.live = self._make(seeds).live_tensors()
        # The `load` of an entry may read the set, and may also change it: it is written before and after.
        self._write_live(set_index)
        for prepared in self.prepared.values():
            prepared.load(set_index, self.live)
        self._write_live(set_index)
        return self.sets[set_index].digest()

    def _write_live(self, set_index: int) -> None:
        """Writes the live operands that were loaded last into a set."""
        for name, tensor in self.live.items():
            write_in_place(getattr(self.sets[set_index], name), tensor)

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
        compilers. On a CPU a later preparation makes no calls if nothing will be timed on these operands, or
        if first calls took as long as timed ones (AS_LONG). Raises Unsupported if `launch` is impossible.

        Returns `seconds`, which this took; `synchronises`: whether a call waits for the device before it
        returns; `source`: a hash of the implementation's source.
        """
        import torch

        started = time.perf_counter()
        if launch not in self.timers:
            self.timers[launch] = timer_for(self.kind, launch)
        timer = self.timers[launch]
        implementation = self._implementation(impl, config)
        on_set: list[Prepared] = []
        outs: list[OwnedOutput | None] = []
        is_later = self.kind == "cpu" and entry in self.first_call_s
        needs_no_calls = is_later and (not self.are_timed or entry in self.settled_call_s)
        calling_s = 0.0
        for operands in self.sets:
            bound, out = self._bound(implementation, operands, on_set[0] if on_set else None)
            on_set.append(bound)
            outs.append(out)
            if call and not needs_no_calls:
                began = time.perf_counter()
                # `Prepared.call` returns None; that of a subclass may return a tensor by mistake.
                returned: object = bound.call()  # type: ignore[func-returns-value]
                calling_s += time.perf_counter() - began
                if isinstance(returned, torch.Tensor):
                    self.returning.add(entry)
        self.first_call_s[entry] = calling_s / len(self.sets) if is_later else math.inf
        timer.synchronize()
        torch.set_num_threads(self.threads)  # a library that was just imported may have changed it
        calls = [bound.call for bound in on_set]
        program = timer.program(calls) if call else Program(calls)
        if is_later:  # The timer makes an untimed call unless it knows that calls are long.
            program.device_s = self.settled_call_s.get(entry, self.first_call_s[entry])
        reads = [reads_of(bound) for bound in on_set]
        self.prepared[entry] = _PreparedEntry(
            on_set, reads, outs, timer, program, implementation, plugin, entry in self.returning
        )
        return {
            "seconds": time.perf_counter() - started,
            "synchronises": program.synchronises,
            "source": source_of(implementation),
        }

    def _implementation(self, name: str, config: Mapping[str, Any] | None) -> Implementation:
        known = [*self.unlisted, *kernels.implementations(self.op.name)]
        with_name = [row for row in known if row.name == name]  # an unlisted one comes first
        if not with_name:
            raise Unsupported(f"there is no {name} in this setting's source tree")
        if config is None:
            return with_name[0]
        from kernels.tuning import Tunable

        assert isinstance(with_name[0], Tunable)
        return with_name[0].configured(config)

    def _bound(
        self, implementation: Implementation, operands: Operands, on_first_set: Prepared | None = None
    ) -> tuple[Prepared, OwnedOutput | None]:
        """An implementation bound to operands, and its output, filled with NaN; None if it allocates one."""
        if implementation.allocates:
            return bind(self.op, implementation, operands, None, on_first_set), None
        out = OwnedOutput(self.op.empty_output(self.sizes, "meta"), self.device)
        out.fill()
        return bind(self.op, implementation, operands, out.tensor, on_first_set), out

    # Samples

    def compare_last(self, entry: str) -> None:
        """Compares the outputs that the last sample left with the first ones, and fills them again. The
        parent requests this before each sample, so that the request `sample` need not do it."""
        self._compare_computed(entry)
        self.prepared[entry].fill()

    def _compare_computed(self, entry: str) -> None:
        prepared = self.prepared[entry]
        for set_index in prepared.computed_sets:
            self.repeats[entry].compare(set_index, prepared.result(set_index), self._sets_are_equal)

    @property
    def _sets_are_equal(self) -> bool:
        """Whether the sets that calls rotate over hold equal values."""
        return not self.op.turns

    def sample(self, entry: str, at_least_s: float) -> dict[str, Any]:
        """Times a sample of about `at_least_s` seconds. Returns the fields of `timers.Sample`."""
        prepared = self.prepared[entry]
        if prepared.filled_at != prepared.program.steps_taken:
            self.compare_last(entry)
        return asdict(prepared.timer.sample(prepared.program, at_least_s))

    # Checks

    def output(self, entry: str, set_index: int = 0, fill: float = math.nan) -> dict[str, Any]:
        """The output of a new call on one of the sets. It is filled with `fill` before the call.

        output, shape, dtype: see `packed`
        digest:  of the operands, which no call may change
        seconds: of the call
        late:    whether the output changed after the call had returned
        guards:  whether nothing was written before or behind it
        ignored: whether the output is unwritten although the call returned a tensor, which nothing reads
        """
        import torch

        prepared = self.prepared[entry]
        out = prepared.outs[set_index]
        if out is not None:
            out.fill(fill)
            prepared.timer.synchronize()
        started = time.perf_counter()
        prepared.call_once(set_index)
        seconds = time.perf_counter() - started
        bits_at_return = bits(out.tensor).clone() if out is not None else torch.empty(0)
        result, dtype = prepared.result(set_index), self.op.empty_output(self.sizes, "meta").dtype
        if (prepared.is_plugin or self.unlisted) and result.dtype != dtype:
            from kernels.op import named  # older commits lack it

            raise TypeError(f"{named(prepared.implementation)} gave {result.dtype}, and has to give {dtype}")
        answer = packed(result)
        prepared.timer.synchronize()
        return answer | {
            "digest": self.sets[set_index].digest(),
            "seconds": seconds,
            "late": out is not None and not same_bits(out.tensor, bits_at_return),
            "guards": out is None or out.guards_hold(),
            "ignored": prepared.returns_tensor and out is not None and bool(out.tensor.isnan().all()),
        }

    def far(self, entry: str) -> dict[str, Any] | None:
        """The output, `packed`, of a call on the same values at offsets that need more than 32 bits (see
        Operands.far). None if the op has no such operands, memory is short, the implementation does not
        support them, or the call fails on a CPU. Raises what else a call raises on a GPU.

        On a CPU only touched pages take memory. There an implementation that copies the whole cache fails at
        a quarter of the free memory, because other workers do the same at the same time."""
        import torch

        operands = None
        try:
            if self.kind != "cpu" and torch.cuda.mem_get_info(self.device)[0] < 2 * FAR_BYTES:
                return None
            operands = self.sets[0].far()
            if operands is None:
                return None
            on_cpu = self.kind == "cpu"
            with devices.memory_at_most(available_memory() // 4) if on_cpu else contextlib.nullcontext():
                return self._called_once(self.prepared[entry], operands)
        except Exception as failure:
            if self.kind == "cpu" or isinstance(failure, (torch.OutOfMemoryError, Unsupported)):
                return None
            raise
        finally:
            operands = None  # frees the memory for others
            empty_cache(self.kind)
            devices.trim_heap()

    def _called_once(self, prepared: _PreparedEntry, operands: Operands) -> dict[str, Any]:
        bound, _ = self._bound(prepared.implementation, operands)
        bound.call()
        prepared.timer.synchronize()
        return packed(bound.result())

    def compared(self, entry: str, seconds: float) -> dict[str, Any]:
        """Compares the outputs that timed calls left, and those of further calls, with the first output:
        COMPARED_CALLS outputs, of which CHANGED_CALLS follow a call on another activation. After `seconds`,
        LEAST_CALLS are enough of both. After LEAST_S as well, one output that follows such a call is enough.

        calls, differed: how many outputs were compared, and how many of them had other bits
        distance: of the farthest of them; None if it is not finite
        outputs: for the judge, each with the number of its `set`: the first output of set 0; that of the last
                 set, where sets differ in value; and the farthest output
        stale:   whether a call gave the old answer to another activation
        guards:  whether nothing was written before or behind any output
        """
        prepared = self.prepared[entry]
        repeats = self.repeats[entry]
        sets = len(self.sets)
        began = time.perf_counter()
        self._compare_computed(entry)
        # Samples may have given enough outputs, but in a sample another call on the same set may have written
        # the output that a call left unwritten. Two more calls show it.
        most_calls = max(COMPARED_CALLS, repeats.calls + 2)
        has_effect = activation_of(self.sets[0]) not in without_effect(self.sets[0])
        most_changed = CHANGED_CALLS if has_effect else 0

        def enough() -> bool:
            spent_s = time.perf_counter() - began
            if spent_s < seconds:
                calls, changed = most_calls, most_changed
            elif spent_s < LEAST_S:
                calls, changed = LEAST_CALLS, min(most_changed, LEAST_CALLS)
            else:
                calls, changed = 0, min(most_changed, 1)
            return repeats.calls >= calls and repeats.changed >= changed

        first_outputs = 1 if self._sets_are_equal else sets
        made = 0
        while len(repeats.first) < first_outputs or not enough():
            # The first two calls have nothing between them, as in a sample.
            follows_change = made > 1 and repeats.changed < most_changed
            self._compare_call(prepared, repeats, made % sets, follows_change)
            made += 1
        judged_sets = [0] if self._sets_are_equal else sorted({0, sets - 1})
        outputs = [packed(repeats.first[index]) | {"set": index} for index in judged_sets]
        if repeats.farthest is not None:
            set_index, output = repeats.farthest
            outputs.append(packed(output) | {"set": 0 if self._sets_are_equal else set_index})
        return {
            "calls": repeats.calls,
            "differed": repeats.differed,
            "distance": finite(repeats.distance),
            "stale": repeats.stale,
            "outputs": outputs,
            "guards": all(out is None or out.guards_hold() for out in prepared.outs),
        }

    def _compare_call(
        self, prepared: _PreparedEntry, repeats: Repeats, set_index: int, follows_change: bool
    ) -> None:
        """Makes one call and compares its output. follows_change: whether a call on another activation comes
        before it, which has to give another output"""
        if follows_change:
            places = prepared.places(set_index, self.sets[set_index], activation_of(self.sets[set_index]))
            has_changed = _roll(places, 1)
            prepared.timer.synchronize()
            try:
                prepared.call_once(set_index)
                first = repeats.first.get(0 if self._sets_are_equal else set_index)
                # An output of zeros need not change: no expert of this rank may have been chosen.
                if has_changed and first is not None and bool(first.any()):
                    repeats.stale = repeats.stale or same_bits(prepared.result(set_index), bits(first))
            finally:
                _roll(places, -1)
                prepared.timer.synchronize()
            repeats.changed += 1
        prepared.fill()
        prepared.call_once(set_index)
        is_graph = len(prepared.program.steps) < len(self.sets)  # it holds calls on all sets
        computed_sets = range(len(self.sets)) if is_graph else [set_index]
        for index in computed_sets:
            repeats.compare(index, prepared.result(index), self._sets_are_equal)

    def unread(self, entry: str) -> list[str]:
        """The live operands that calls do not read: the output stays as it was when other valid values are
        written where they are stored. Afterwards the loaded operands are in place again."""
        prepared = self.prepared[entry]
        operands = self.sets[0]
        prepared.call_once(0)
        if not prepared.result(0).any():  # for example if all weights are zero
            return []
        unread = []
        other_live = self._make({**self.seeds, "live": Seeds(**self.seeds).live + 1}).live_tensors()
        for name, values in other_live.items():
            places = prepared.places(0, operands, name)
            if name in without_effect(operands) or same_bits(values, bits(places[0])):
                continue
            before = bits(prepared.result(0)).clone()
            for place in places:
                write_in_place(place, values)
            prepared.timer.synchronize()
            prepared.call_once(0)
            if same_bits(prepared.result(0), before):
                unread.append(name)
        if self.live:
            prepared.load(0, self.live)
            self._write_live(0)
        return unread

    # What ran

    def start_profiler(self) -> None:
        start(self.kind)

    def profile(self, entry: str) -> dict[str, Any]:
        """What ran in a call, and how long (see `profile` in profile.py). Calls of a graph are made eagerly.

        picked: what the library says of its choice
        ran:    what else identifies the code (see `fingerprint`)
        """
        prepared = self.prepared[entry]
        calls = [bound.call for bound in prepared.on_set]
        try:
            call_s = prepared.program.device_s / prepared.program.calls_per_step
            profiled = profile(calls, self.kind, prepared.timer.synchronize, call_s)
            ran = fingerprint(calls[0], self.kind, [kernel["name"] for kernel in profiled["kernels"]])
        finally:
            # Where calls allocate outputs, `result` now gives those of the eager calls. No replay of the old
            # graph would write these, so a new graph is captured.
            prepared.program = prepared.timer.program(calls)
            prepared.filled_at = None
        return profiled | {"picked": prepared.on_set[0].picked(), "ran": ran}

    def close(self) -> None:
        self.prepared.clear()
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
    """The tensors in which the calls read live operands, by name of the operand."""
    return dict(prepared.reads() if hasattr(prepared, "reads") else prepared.inputs())  # of older commits


def same_bits(output: torch.Tensor, known_bits: torch.Tensor) -> bool:
    """Whether an output has these bits, which are given as integers (see `bits`)."""
    import torch

    return torch.equal(bits(output).to(known_bits.device), known_bits)


def write_in_place(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values without counting it in autograd's version of `place`, as an engine's kernels do."""
    place.data.copy_(values)


def _roll(places: Sequence[torch.Tensor], columns: int) -> bool:
    """Rolls the last dimension of each tensor in place. Returns whether that changed any value."""
    has_changed = False
    for place in places:
        rolled = bits(place).roll(columns, -1)
        has_changed = has_changed or not same_bits(place, rolled)
        write_in_place(place, rolled.view(place.dtype))
    return has_changed


def without_effect(operands: Operands) -> frozenset[str]:
    """The live operands that the output does not depend on. Operands of older commits do not say it."""
    return getattr(operands, "without_effect", frozenset())


def activation_of(operands: Operands) -> str:
    """The live operand that the checks change: the first that the output depends on. Every call reads all of
    it. Where the output depends on none, the first."""
    live = list(operands.live_tensors())
    with_effect = [name for name in live if name not in without_effect(operands)]
    return with_effect[0] if with_effect else live[0]
