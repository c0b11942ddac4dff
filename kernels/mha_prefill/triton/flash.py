"""The suite's own MHA prefill in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from kernels.attention import BYTES
from kernels.formats import fp8_format
from kernels.mha_prefill.operands import NOPE, ROPE, VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes
from kernels.op import Call
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options, require_format
from kernels.tuning import Target

if TYPE_CHECKING:
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

# Values that turn_kernel has transposed are called turned. They have a row for each column of v, in which the
# keys of a sequence are side by side, in the order of `_in_order_of_registers`. Each sequence is filled up to
# a multiple of PAD keys, so that the steps of a program are whole.
PAD = 128


@dataclass(frozen=True)
class FlashConfig:
    """What one program takes."""

    rows: int  # query rows
    keys: int  # keys of a step of its loop; divides PAD
    warps: int = 4
    stages: int = 2  # of the pipeline of its loop
    instruction: int = 0  # rows of AMD's matrix instruction, 0 elsewhere
    waves: int = 0  # waves of a SIMD for which AMD's compiler must leave registers; 0: it decides
    turned: bool = False  # another kernel transposes FP8 values first


def turnable(target: Target, sizes: MhaPrefillSizes) -> bool:
    """Whether it may pay to transpose values: wgmma takes FP8 values with keys side by side alone, and gfx942
    loads other layouts only by shuffling bytes. sm_100 takes both, gfx950 has a load that transposes."""
    return sizes.dtype == "fp8" and target.arch in ("sm_90", "gfx942")


# Chosen by compiling with Triton 3.6 and 3.7, not yet by measuring. None of them spills, every product uses
# the fastest instruction, and no product is serialised. On AMD two programs fit on a compute unit, for which
# Triton 3.6 leaves registers only with `waves`.
HEURISTIC = {
    "cuda": FlashConfig(128, 128, warps=8, stages=2),
    "sm_90 fp8": FlashConfig(128, 64, warps=4, stages=3, turned=True),
    "rocm bf16": FlashConfig(128, 32, warps=4, stages=3, instruction=32, waves=2),
    "rocm fp8": FlashConfig(128, 64, warps=4, stages=2, instruction=32, waves=2),
    "gfx942 bf16": FlashConfig(128, 32, warps=4, stages=1, instruction=32, waves=2),
    "gfx942 fp8": FlashConfig(128, 64, warps=4, stages=1, instruction=32, waves=2, turned=True),
    "cpu": FlashConfig(128, 128),
}


def turned_columns(keys: int, batch: int) -> int:
    """The columns of turned values [heads * 128, columns]: an upper bound, as each sequence begins at a
    multiple of PAD. keys: of all sequences"""
    return (keys // PAD + batch) * PAD


# Seconds that the interpreter takes on one core of a Zen 4 server for a step over 128 rows and 128 keys; a
# program takes as long again outside its steps. FP8 takes longer because its codes are widened.
INTERPRETED_STEP_S = {"bf16": 4e-3, "fp8": 1e-2}


class FlashVarlen(SuiteTriton):
    """There is a program for each tile of a sequence's query rows. Blocks of keys above the diagonal are
    skipped, and only those on it are masked. q and k are multiplied in parts of 128 and 64 columns, so that
    nothing is padded. With FP8 operands weights are rounded to FP8, scaled up to use the format's range."""

    name = "triton.flash_varlen"
    Config = FlashConfig
    activations = "fp8"

    def configurations(self, target: Target, sizes: MhaPrefillSizes) -> Iterator[FlashConfig]:
        """Tiles of fewer rows than twice the most new tokens, with an instruction's rows for each warp."""
        # With two programs of four warps on a compute unit one computes while the other waits. One program of
        # eight warps reads half as much. Steps of many keys wait less often.
        turned = (False, True) if turnable(target, sizes) else (False,)
        if target.kind == "rocm":
            # (rows, warps, waves). Eight warps are two waves of each SIMD anyway.
            tiles = [(64, 4, 0), (64, 4, 2), (128, 4, 0), (128, 4, 2), (128, 8, 0), (256, 8, 0)]
            keys: tuple[int, ...] = (32, 64, 128) if sizes.dtype == "fp8" else (32, 64)
            instructions: tuple[int, ...] = (16, 32)
            stages: tuple[int, ...] = (1, 2) if target.arch == "gfx942" else (1, 2, 3)
        else:
            tiles = [(64, 4, 0), (128, 4, 0), (128, 8, 0)]
            keys, stages, instructions = (32, 64, 128), (2, 3, 4), (0,)
        choices = product(tiles, keys, stages, instructions, turned)
        for (rows, warps, waves), step, depth, instruction, turn in choices:
            # Scores and output alone would fill the 256 registers of each of a warp's 32 threads.
            fills_registers = target.kind == "cuda" and rows * (step + VALUE) >= 256 * 32 * warps
            if instruction * warps <= rows < 2 * max(64, sizes.most_new) and not fills_registers:
                yield FlashConfig(rows, step, warps, depth, instruction, waves, turn)

    def heuristic(self, target: Target, sizes: MhaPrefillSizes) -> FlashConfig:
        """By architecture and dtype; with tiles of 64 rows where no sequence has more new tokens."""
        names = (f"{target.arch} {sizes.dtype}", f"{target.kind} {sizes.dtype}", target.kind)
        config = next(HEURISTIC[name] for name in names if name in HEURISTIC)
        if target.kind != "cpu" and sizes.most_new <= 64:
            return replace(config, rows=64, warps=4, instruction=min(16, config.instruction))
        return config

    def features(self, sizes: MhaPrefillSizes) -> dict[str, float | str]:
        return {
            "batch": sizes.batch,
            "queries": sizes.queries,
            "keys": sizes.keys,
            "new": sizes.queries / sizes.batch,
            "prefix": (sizes.keys - sizes.queries) / sizes.batch,
            "heads": sizes.heads,
            "dtype": sizes.dtype,
        }

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """The bytes of the list of programs, and of turned values and the list of their blocks."""
        programs = sizes.heads * (sizes.queries // 64 + sizes.batch)  # of 64 rows or more, 12 bytes each
        bytes_per_column = sizes.heads * VALUE + 1 if sizes.dtype == "fp8" else 0
        return 12 * programs + turned_columns(sizes.keys, sizes.batch) * bytes_per_column

    def interpreted_s(self, sizes: MhaPrefillSizes) -> float:
        config = self.heuristic(CPU, sizes)
        steps = [
            math.ceil(min(prefix + first + config.rows, prefix + new) / config.keys)
            for prefix, new in sizes.lengths()
            for first in range(0, new, config.rows)
        ]
        return INTERPRETED_STEP_S[sizes.dtype] * sizes.heads * (sum(steps) + len(steps))  # one per program

    def prepare_with(
        self, config: FlashConfig, target: Target, operands: MhaPrefillOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        import torch
        import triton.language as tl

        from kernels.mha_prefill.triton.flash_jit import flash_kernel

        prepared = ConfiguredPrepared(operands, out)
        o, sizes, device = operands, operands.sizes, out.device
        q, k, v = (prepared.readable(tensor) for tensor in (o.q, o.k, o.v))
        # For turned values: how many threads share a row of scores in a matrix instruction (a wave of AMD has
        # 64 threads), and how many neighbouring columns each of them holds.
        lanes, run = (64 // config.instruction, 4) if config.instruction else (4, 2)
        width = turned_columns(sizes.keys, sizes.batch)
        constants = {"HEADS": sizes.heads, "VALUE": VALUE, "PAD": PAD, "LANES": lanes, "RUN": run}
        format, headroom = "bf16", 0  # the largest softmax weight of a row is 2 ** headroom
        if o.is_fp8:
            require_format(sizes.fp8, target)
            format, headroom = sizes.fp8, int(math.log2(fp8_format(sizes.fp8).max))
        prepared.launches = []
        if config.turned:
            turned = torch.empty(sizes.heads * VALUE, width, dtype=torch.uint8, device=device)
            prepared.launches.append(turning(o, turned, constants))
            v = turned.view(v.dtype)

        lengths = [(s.prefix, s.new) for s in o.sequences]
        tiles = order(lengths, sizes.heads, config.rows, target, (WIDTH + VALUE) * BYTES[sizes.dtype])
        formats = {"bf16": tl.bfloat16, "e4m3fn": tl.float8e4nv, "e4m3fnuz": tl.float8e4b8}
        programs = torch.tensor(tiles, dtype=torch.int32, device=device)
        tensors = (q, k, v, prepared.written, o.cu_q, o.cu_k, programs)
        scales = (o.scale * math.log2(math.e), o.q_descale, o.k_descale, o.v_descale)
        blocks = descriptors(q, k, v, config) if target.kind == "cuda" else [None] * 5
        arguments = (*tensors, *scales, width, *blocks)
        flash = functools.partial(
            flash_kernel[(len(tiles),)],
            *arguments,
            **constants,
            NOPE=NOPE,
            ROPE=ROPE,
            BLOCK_M=config.rows,
            BLOCK_N=config.keys,
            TURNED=config.turned,
            HEADROOM=headroom,
            PRODUCT=tl.float32 if prepared.interpreted else formats[format],
            FNUZ_BITS=q.dtype == torch.uint8,
            **options(config.warps, config.stages, config.instruction),
            **({"waves_per_eu": config.waves} if config.waves else {}),
        )
        prepared.launches.append(flash)
        return prepared


def turning(o: MhaPrefillOperands, turned: torch.Tensor, constants: dict[str, int]) -> Call:
    """The launch that fills `turned`, uint8 [heads * 128, columns], with FP8 codes. Sequence b begins at
    column (cu_k[b] // PAD + b) * PAD and is filled up with zeros to a multiple of PAD."""
    import torch

    from kernels.mha_prefill.triton.flash_jit import turn_kernel

    blocks = [(i, start) for i, s in enumerate(o.sequences) for start in range(0, s.length, PAD)]
    block_list = torch.tensor(blocks, dtype=torch.int32, device=turned.device)
    arguments = (o.v.view(torch.uint8), turned, o.cu_k, block_list, turned.shape[1])
    return functools.partial(turn_kernel[(o.sizes.heads, len(blocks))], *arguments, **constants)


def descriptors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: FlashConfig
) -> list[TensorDescriptor]:
    """Five descriptors for loads of blocks by NVIDIA's TMA: two of q, for the first 128 columns of a head and
    for its last 64, the same of k, and one of v, turned or not."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    q, k = q.flatten(1), k.flatten(1)
    blocks = [(q, [config.rows, NOPE]), (q, [config.rows, ROPE])]
    blocks += [(k, [config.keys, NOPE]), (k, [config.keys, ROPE])]
    blocks += [(v, [VALUE, config.keys]) if config.turned else (v.flatten(1), [config.keys, VALUE])]
    return [TensorDescriptor.from_tensor(tensor, shape) for tensor, shape in blocks]


class Tile(NamedTuple):
    """What one program takes: some query rows of one head of one sequence."""

    head: int
    sequence: int
    first: int  # its first query row, counted from the sequence's first


# Kind of platform -> the dies, to which consecutive programs go in turn, and the bytes of a die's cache that
# keys and values may fill. H100: 50 MB of L2 (architecture white paper); MI300X and MI350X: 8 XCDs with 4 MB
# of L2 each (CDNA 3 and 4 white papers), and consecutive programs go to consecutive XCDs (AITER's remap_xcd).
CACHES = {"cuda": (1, 32 << 20), "rocm": (8, 4 << 20), "cpu": (1, 32 << 20)}


def order(
    lengths: list[tuple[int, int]], heads: int, rows: int, target: Target, key_bytes: int
) -> list[Tile]:
    """All tiles of `rows` query rows, in the order of the programs that take them.

    lengths:   (prefix, new) of each sequence
    key_bytes: the bytes of a key and its value, of one head

    Each head of a sequence is given whole to the die with the least work so far, the longest sequence first.
    On a die heads follow each other in sections. The cache holds the keys and values of a section, so that
    these come from memory once; a head that is too large for it is a section of its own. Within a section the
    tiles with the most keys go first, so that none is left to run alone at the end."""
    dies, cache_bytes = CACHES[target.kind]
    most_keys = cache_bytes // key_bytes  # of a section
    work = [new * prefix + new * (new + 1) // 2 for prefix, new in lengths]  # pairs of a query and a key
    load = [(0, die) for die in range(dies)]  # a heap of (work so far, die)
    section = [0] * dies  # the number of each die's last section
    section_keys = [0] * dies  # the keys in that section so far
    queues: list[list[tuple[int, int, Tile]]] = [[] for _ in range(dies)]  # of (section, keys, tile)
    for sequence in sorted(range(len(lengths)), key=lambda s: -work[s]):
        prefix, new = lengths[sequence]
        for head in range(heads):
            work_so_far, die = load[0]
            heapq.heapreplace(load, (work_so_far + work[sequence], die))
            if section_keys[die] and section_keys[die] + prefix + new > most_keys:
                section[die] += 1
                section_keys[die] = 0
            section_keys[die] += prefix + new
            for first in range(0, new, rows):
                queues[die].append((section[die], prefix + first, Tile(head, sequence, first)))
    tiles = []  # of each die
    for queue in queues:
        queue.sort(key=lambda entry: (entry[0], -entry[1]))  # tiles of as many keys stay in order
        tiles.append([tile for _, _, tile in queue])
    # Consecutive programs go to consecutive dies: one tile of each die after the other.
    return [tile for of_dies in zip_longest(*tiles) for tile in of_dies if tile is not None]
