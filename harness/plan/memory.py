"""Plans the memory of a case: over how many sets of operands calls rotate, which entries fit at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import kernels
from harness.plan.entry import Entry, by_worker
from kernels.op import MOST_ELEMENTS, Op
from kernels.platform import Platform, free_memory
from shapes.case import Case

MAX_FLOPS = {"cpu": 4e11, "cuda": 2e13, "rocm": 2e13}
"""A reference of more flops is computed for a sample of the rows. Two CPU cores take about 10 s for 4e11."""

MEMORY_SHARE = {"cpu": 0.8, "cuda": 0.9, "rocm": 0.9}
"""The share of the free memory that may be used. On a CPU the parent and its libraries need some."""

GIB = 1 << 30
MIB = 1 << 20

WORKER_STREAMS = 2  # the streams of a worker on a GPU: the default one, and one for capturing graphs

CONTEXT = 700 * MIB
"""The memory that the driver takes in each process that computes on a GPU, with the loaded code of kernels:
0.67 GiB on an H100 with CUDA 13.0 and torch 2.11 (results/h100/first-contact/timers.jsonl)."""

DRAWING = 256 * MIB
"""The least memory, in segments of torch's allocator, for drawing operands and hashing them in pieces."""

ROTATE_CACHES = 2
"""Two calls on a set lie this many last-level caches apart, or as many bytes as are measured to be enough."""

MOST_COPIES = 64  # the most sets that calls rotate over
UNKNOWN_LEVEL = 256 * MIB  # assumed for an unknown last-level cache: the largest one of a GPU in 2026


@dataclass(frozen=True)
class Rotation:
    """The sets of operands that calls rotate over."""

    mode: str  # serving: sets differ in what a serving step streams; cold: in all; warm: there is one set
    copies: int  # the number of sets
    bytes: int  # how many bytes calls touch before they come to the same set again
    last_level: int  # bytes of the last-level cache
    enough: bool  # whether calls read from memory, and not from the cache, when they come to a set again
    why: str = ""  # why it is not enough


def rotation(
    op: Op,
    sizes: Any,
    mode: str,
    last_level: int,
    reach: int = 0,
    fits: Callable[[int], bool] = lambda copies: True,
) -> Rotation:
    """The sets of operands that the calls of a case rotate over, as many as it takes for calls to read from
    memory what a serving step streams.

    mode:       as in Rotation
    last_level: bytes of the last-level cache; 0 if unknown
    reach:      bytes whose repeated reading was measured to be as slow as memory; 0 if that was not measured
    fits:       whether memory holds so many sets; one set is made in any case
    """
    level = last_level or UNKNOWN_LEVEL
    needed_between = min(reach or math.inf, ROTATE_CACHES * level)
    # Of a call: activations and the output. Only in cold mode each set has its own.
    other_bytes = int(op.work(sizes).bytes) - op.streamed_bytes(sizes)

    def touched(copies: int) -> int:
        """The bytes that calls on so many sets touch, apart from what the sets share."""
        return op.streamed_bytes(sizes, copies) + (copies * other_bytes if mode == "cold" else 0)

    def enough(copies: int) -> bool:
        """Whether the cache has lost a set when calls come to it again."""
        # Between two calls on a set come those on all others. With a single set none come between: then the
        # end of a call has pushed out what the next call reads first.
        between = touched(copies) - touched(1) if copies > 1 else touched(1)
        if mode == "serving":  # what the sets share uses the cache, too
            between += other_bytes
        return between >= needed_between

    most = 1 if mode == "warm" or not touched(1) else MOST_COPIES
    # The fewest sets that are enough, or after which further ones touch no other bytes.
    wanted = next(n for n in range(1, most + 1) if enough(n) or touched(n) == touched(most))
    copies = next((n for n in range(wanted, 1, -1) if fits(n)), 1)
    if enough(copies):
        why = ""
    elif mode == "warm":
        why = "one set, over and over, as asked"
    elif not touched(1):
        why = "a serving step streams none of its operands"
    elif copies < wanted:
        why = f"memory holds {copies} of the {wanted} sets of operands that it takes"
    else:
        sets = f"{copies} sets of operands touch" if copies > 1 else "one set of operands touches"
        why = f"{sets} {touched(copies) / 1e6:.3g} MB; the last level holds {level / 1e6:.3g} MB"
    return Rotation(mode, copies, touched(copies), level, enough(copies), why)


class Memory:
    """The bytes that groups of entries need, and may use, for one case on one device in a cache mode."""

    def __init__(self, case: Case, platform: Platform, baseline: str, mode: str, share: float = 1.0) -> None:
        """baseline: an implementation; mode: as in Rotation; share: of the free memory of a shared machine"""
        self.op = op = kernels.OPS[case.op]
        self.sizes = sizes = op.sizes(case.sizes)
        self.boundary = case.boundary
        self.baseline = baseline
        self.mode = mode
        on_cpu = platform.kind == "cpu"
        free = free_memory(platform)
        self.usable = math.inf  # where no tool says what is free
        if free is not None:
            self.usable = MEMORY_SHARE[platform.kind] * free
            if on_cpu:
                self.usable *= share
        blas = blas_workspace(platform)
        context = 0 if on_cpu else CONTEXT
        self.worker_bytes = context + WORKER_STREAMS * blas  # of a worker without entries and operands
        # judge_bytes: what the judge has at any time, on a CPU with the references that it keeps;
        # reference_bytes: what it has besides on a GPU while it computes a reference.
        if on_cpu:
            self.judge_bytes = op.operand_bytes(sizes) + kept_references(op, sizes, "cpu")
            self.reference_bytes = 0
        else:
            self.judge_bytes = context + blas
            self.reference_bytes = op.operand_bytes(sizes) + max(DRAWING, op.reference_bytes(sizes))

    def needed(self, group: Sequence[Entry], copies: int) -> int:
        """The most bytes of the device's memory that the judge and the group's workers have at a time."""
        timed = [entry for entry in group if not entry.interpreted]
        interpreted = [entry for entry in group if entry.interpreted]
        if not any(entry.setting.is_rerun for entry in timed):
            # The baseline, or the first entry in its place, is prepared twice, as the A/A pair.
            baselines = [entry for entry in timed if entry.impl.name == self.baseline]
            timed += (baselines or timed)[:1]
        return self.judge_bytes + max(
            self._workers(timed, copies),  # while rounds are measured
            self._workers(timed, 1) + self.reference_bytes,  # before: the judge computes a reference
            self._workers(interpreted, 1),  # after them
        )

    def _workers(self, entries: Sequence[Entry], copies: int) -> int:
        return sum(
            memory_needed(self.op, self.sizes, members, copies, self.mode, self.boundary) + self.worker_bytes
            for members in by_worker(entries)
        )

    def fits(self, group: Sequence[Entry], copies: int) -> bool:
        return self.needed(group, copies) <= self.usable

    def baselines(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries of every group: the baseline under the first setting; with settings also its rerun."""
        baselines = [entry for entry in entries if entry.impl.name == self.baseline]
        return baselines[:1] + [entry for entry in baselines[1:] if entry.setting.is_rerun]

    def holds(self, entries: Sequence[Entry], copies: int) -> bool:
        """Whether every entry that fits beside the baseline on one set also fits on `copies` sets."""
        baselines = self.baselines(entries)
        smallest = [[*baselines, entry] for entry in entries if entry not in baselines] or [baselines]
        return all(self.fits(group, copies) for group in smallest if self.fits(group, 1))

    def groups(self, entries: Sequence[Entry], copies: int) -> tuple[list[list[Entry]], list[Entry]]:
        """Groups of entries that fit into memory together, each with the baseline; and the entries that do
        not fit at all, which fail as `unsupported`. An entry that does not fit beside the baseline is alone
        in its group, with a time and no ratio."""
        baselines = self.baselines(entries)
        groups: list[list[Entry]] = [list(baselines)]
        alone: list[list[Entry]] = []
        too_large: list[Entry] = []
        for entry in entries:
            if entry in baselines:
                continue
            if self.fits([*groups[-1], entry], copies):
                groups[-1].append(entry)
            elif self.fits([*baselines, entry], copies):
                groups.append([*baselines, entry])
            elif self.fits([entry], copies):
                alone.append([entry])
            else:
                too_large.append(entry)
        if baselines and not self.fits(baselines, copies):
            too_large += baselines
            groups = [[entry for entry in group if entry not in baselines] for group in groups]
        # A rerun has no record of its own, so that of the baseline says it.
        too_large = [entry for entry in too_large if not entry.setting.is_rerun]
        for entry in too_large:
            needed = f"needs {self.needed([entry], copies) / GIB:.1f} GiB of memory"
            entry.fail("unsupported", f"{needed}; {self.usable / GIB:.1f} GiB may be used")
        return [group for group in [*groups, *alone] if group], too_large


def memory_needed(
    op: Op, sizes: Any, entries: Sequence[Entry], copies: int, mode: str = "serving", boundary: str = "core"
) -> int:
    """Bytes of one worker's operands and entries, on so many sets of operands. mode: as in Rotation"""
    # The first set is there twice while it moves to fresh buffers. In cold mode sets share nothing.
    further_set = op.operand_bytes(sizes) if mode == "cold" else op.turn_bytes(sizes)
    total = 2 * op.operand_bytes(sizes) + (copies - 1) * further_set
    output = op.output_bytes(sizes)
    # Sets differ in the values of live operands (`Op.turns`), or are equal. The worker keeps the first output
    # of each set that differs, and the farthest output of all (outputs.Repeats).
    kept_outputs = copies + 1 if op.turns else 2
    layouts = 1 if op.turns else copies  # sets that differ in live operands share the stationary ones
    shared_layouts: dict[str, int] = {}
    before_capture = 0
    for entry in entries:
        impl = entry.impl
        total += copies * (impl.workspace(sizes) + output) + impl.scratch(sizes) + kept_outputs * output
        if impl.native(boundary) != boundary:  # Producers write the operands of its narrower call.
            total += copies * op.narrowed_bytes(sizes)
        if impl.shared_layout:
            shared_layouts[impl.shared_layout] = layouts * impl.layout(sizes)
        else:
            total += layouts * impl.layout(sizes)
        if entry.launch == "graph":
            # A graph keeps its scratch, counted above, and the outputs that its library allocates. The eager
            # calls before its capture need as much again, and free it for those before the next capture.
            allocated = copies * output if impl.allocates else 0
            before_capture = max(before_capture, impl.scratch(sizes) + allocated)
    return total + sum(shared_layouts.values()) + before_capture


def blas_workspace(platform: Platform) -> int:
    """Bytes that torch keeps for matrix products for each stream that they ran on, beside all else:
    32 MiB for cuBLAS, which cuBLASLt shares; 128 MiB for hipBLAS on gfx942 and gfx950, 32 MiB on others,
    and 76 MiB for hipBLASLt (PyTorch in 2026, aten/src/ATen/cuda/CublasHandlePool.cpp:
    parseChosenWorkspaceSize, parseCUDABlasLtWorkspaceSize). Before Hopper, and on Blackwell under older
    versions, cuBLAS gets 8 MiB."""
    match platform.kind:
        case "cuda":
            return 32 * MIB
        case "rocm":
            return (128 if platform.arch in ("gfx942", "gfx950") else 32) * MIB + 76 * MIB
    return 0


def kept_references(op: Op, sizes: Any, kind: str) -> int:
    """Bytes of the references that the judge keeps in the host's memory: four references in each of up to two
    boundaries, at up to 16 bytes for each element of the rows that are computed."""
    references = 4 * min(2, len(op.boundaries))
    elements = op.output_bytes(sizes) / 2  # of 16 bits
    computed_share = min(1.0, MAX_FLOPS[kind] / op.work(sizes).flops, MOST_ELEMENTS / elements)
    return int(references * 16 * computed_share * elements)
