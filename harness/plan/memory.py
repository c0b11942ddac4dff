"""Memory of a case: which entries a device holds at once, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.plan.entry import Entry
from kernels.op import MOST_ELEMENTS, Op
from kernels.platform import Platform, free_memory

# A reference of more than this is sampled: about 10 s of products on two CPU cores.
MAX_FLOPS = {"cpu": 4e11, "cuda": 2e13, "rocm": 2e13}

# Of the memory that is free: of a CPU's, where the parent and its libraries need some, and of a GPU's.
MEMORY_SHARE = {"cpu": 0.8, "cuda": 0.9, "rocm": 0.9}
GIB = 1 << 30
MIB = 1 << 20

# That a worker on a GPU calls on: the default one, and the one that graphs are captured on.
WORKER_STREAMS = 2

# Of the driver's own in each process that computes on a GPU, with the code of torch's and libraries' kernels
# that it loaded: 0.67 GiB on an H100 with CUDA 13.0 and torch 2.11 (results/h100/first-contact/timers.jsonl).
CONTEXT = 700 * MIB

# What drawing operands and hashing them piece by piece takes at least, in segments of torch's allocator.
DRAWING = 256 * MIB


class Memory:
    """Of one case on one device: bytes that groups of entries need, and may take, in a cache mode.

    share:     of the machine's memory, which others may share that are measured meanwhile
    judge:     what the judge holds while anything is measured; on a CPU its references are in it
    computing: what it holds beside that while it computes a reference, and workers have one set of operands
    """

    def __init__(
        self,
        op: Op,
        sizes: Any,
        platform: Platform,
        baseline: str,
        mode: str,
        share: float = 1.0,
        boundary: str = "core",
    ) -> None:
        self.op, self.sizes, self.baseline, self.mode, self.boundary = op, sizes, baseline, mode, boundary
        on_cpu = platform.kind == "cpu"
        free = free_memory(platform)
        self.limit = float("inf")  # where no tool says what is free
        if free is not None:
            self.limit = MEMORY_SHARE[platform.kind] * free * (share if on_cpu else 1)
        self.blas = blas_workspace(platform)
        self.context = 0 if on_cpu else CONTEXT
        if on_cpu:
            self.judge, self.computing = op.operand_bytes(sizes) + kept_references(op, sizes, "cpu"), 0
        else:
            self.judge = CONTEXT + self.blas
            self.computing = op.operand_bytes(sizes) + max(DRAWING, op.reference_bytes(sizes))

    def needed(self, group: Sequence[Entry], copies: int) -> int:
        """Of the device's memory, for the judge and the group's workers on so many sets of operands; those
        that are interpreted have theirs after the others', and need one set."""
        timed = [c for c in group if not c.interpreted]
        # The baseline, or else the first, stands for two: it is prepared twice, as the A/A pair.
        reruns = [c for c in timed if c.impl.name == self.baseline] or timed
        twice = timed if any(c.setting.is_rerun for c in timed) else [*timed, *reruns[:1]]
        checked = [c for c in group if c.interpreted]
        return self.judge + max(
            self._workers(twice, copies),
            self._workers(twice, 1) + self.computing,
            self._workers(checked, 1),
        )

    def _workers(self, entries: Sequence[Entry], copies: int) -> int:
        workers: dict[tuple[str, str], list[Entry]] = {}
        for c in entries:
            workers.setdefault((c.setting.name, c.impl.runtime), []).append(c)
        return sum(
            memory_needed(self.op, self.sizes, members, copies, self.mode, self.boundary)
            + WORKER_STREAMS * self.blas
            + self.context
            for members in workers.values()
        )

    def fits(self, group: Sequence[Entry], copies: int) -> bool:
        return self.needed(group, copies) <= self.limit

    def baselines(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those that stand in every group: the baseline under the first setting, if it is there, and that
        setting again."""
        baselines = [c for c in entries if c.impl.name == self.baseline]
        return [c for i, c in enumerate(baselines) if i == 0 or c.setting.is_rerun]

    def holds(self, entries: Sequence[Entry], copies: int) -> bool:
        """Whether every entry that fits beside the baseline on one set also fits on `copies` sets."""
        baselines = self.baselines(entries)
        every = [[*baselines, c] for c in entries if c not in baselines] or [baselines]
        return all(self.fits(group, copies) for group in every if self.fits(group, 1))

    def groups(self, entries: Sequence[Entry], copies: int) -> tuple[list[list[Entry]], list[Entry]]:
        """Groups of entries that fit in memory beside each other, each with the baseline; who does not
        fit beside the baseline stands alone, with a time and no ratio. And those that do not fit at all."""
        baselines = self.baselines(entries)
        groups: list[list[Entry]] = [list(baselines)]
        too_large, alone = [], []
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
            groups = [[c for c in g if c not in baselines] for g in groups]
        too_large = [c for c in too_large if not c.setting.is_rerun]
        for entry in too_large:
            need = self.needed([entry], copies)
            entry.fail(
                "unsupported", f"needs {need / GIB:.1f} GiB of memory; {self.limit / GIB:.1f} GiB may be used"
            )
        return [group for group in [*groups, *alone] if group], too_large


def memory_needed(
    op: Op,
    sizes: Any,
    entries: Sequence[Entry],
    copies: int,
    mode: str = "serving",
    boundary: str = "core",
) -> int:
    """Bytes of one worker: the sets that calls rotate over, the first twice while it moves to fresh buffers;
    each entry's layout of stationary operands, unless it is shared, workspace and outputs, two of them
    kept to compare others with; and its scratch. A graph has its own, and outputs of its own where a library
    allocates them, beside those of the calls before it was captured."""
    # In cold mode a set shares nothing with the others (`Operands.turned`).
    further = op.operand_bytes(sizes) if mode == "cold" else op.turn_bytes(sizes)
    output = op.output_bytes(sizes)
    layouts = 1 if op.turns else copies
    impls = [c.impl for c in entries]
    kept = (copies + 1 if op.turns else 2) * output
    per_entry = sum(copies * (i.workspace(sizes) + output) + i.scratch(sizes) + kept for i in impls)
    composed = sum(i.native(boundary) != boundary for i in impls)
    per_entry += copies * composed * op.narrowed_bytes(sizes)
    own = [i for i in impls if not i.shared_layout]
    shared = {i.shared_layout: i for i in impls if i.shared_layout}
    per_entry += layouts * sum(i.layout(sizes) for i in (*own, *shared.values()))
    before = max(
        (
            c.impl.scratch(sizes) + (copies * output if c.impl.allocates else 0)
            for c in entries
            if c.launch == "graph"
        ),
        default=0,
    )
    return 2 * op.operand_bytes(sizes) + (copies - 1) * further + per_entry + before


def blas_workspace(platform: Platform) -> int:
    """Bytes that torch keeps for matrix products for each stream that it was called on, beside all else:
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
    """Bytes of the references that the judge keeps, in the host's memory: up to 16 bytes for each element
    of the output's rows that it computes, four references in each of up to two boundaries."""
    references = 4 * len(op.boundaries[:2])
    elements = op.output_bytes(sizes) / 2
    sampled = min(1.0, MAX_FLOPS[kind] / op.work(sizes).flops, MOST_ELEMENTS / elements)
    return int(references * 16 * sampled * elements)
