"""The suite's own MHA prefill in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from kernels.attention import BYTES
from kernels.formats import fp8_format
from kernels.mha_prefill.operands import NOPE, ROPE, VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes, takes
from kernels.op import Call
from kernels.support import Support
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options, require_format
from kernels.tuning import Target

if TYPE_CHECKING:
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

PAD = 128  # a sequence's turned values are filled up to a multiple of so many keys; at least a step's


@dataclass(frozen=True)
class FlashConfig:
    """What one program takes."""

    rows: int  # query rows
    keys: int  # keys of a step of its loop; divides PAD
    warps: int = 4
    stages: int = 2
    instruction: int = 0  # rows of AMD's matrix instruction, 0 elsewhere
    waves: int = 0  # waves of a SIMD for which AMD's compiler must leave registers; 0: it decides
    turned: bool = False  # a kernel before it writes FP8 values so that keys are side by side


def turnable(target: Target, sizes: MhaPrefillSizes) -> bool:
    """Whether FP8 values may be needed with keys side by side: wgmma takes no other layout, and gfx942 loads
    others only by shuffling bytes. sm_100 takes both, gfx950 has a load that transposes."""
    return sizes.dtype == "fp8" and target.arch in ("sm_90", "gfx942")


# Chosen by compiling with Triton 3.6 and 3.7, not yet by measuring. None of them spills, every product uses
# the fastest instruction, and no product is serialised. On AMD two programs fit on a compute unit, which
# Triton 3.6 has to be told (`waves`).
HEURISTIC = {
    "cuda bf16": FlashConfig(128, 128, warps=8, stages=2),
    "cuda fp8": FlashConfig(128, 128, warps=8, stages=2),
    "sm_90 fp8": FlashConfig(128, 64, warps=4, stages=3, turned=True),
    "rocm bf16": FlashConfig(128, 32, warps=4, stages=3, instruction=32, waves=2),
    "rocm fp8": FlashConfig(128, 64, warps=4, stages=2, instruction=32, waves=2),
    "gfx942 bf16": FlashConfig(128, 32, warps=4, stages=1, instruction=32, waves=2),
    "gfx942 fp8": FlashConfig(128, 64, warps=4, stages=1, instruction=32, waves=2, turned=True),
    "cpu bf16": FlashConfig(128, 128),
    "cpu fp8": FlashConfig(128, 128),
}


def columns(keys: int, batch: int) -> int:
    """Columns of turned values: each sequence begins at a multiple of PAD."""
    return (keys // PAD + batch) * PAD


# Seconds that the interpreter takes on one core of a Zen 4 server for a step over 128 rows and 128 keys, and
# again for a program outside its steps. FP8 takes longer because its codes are widened.
INTERPRETED_STEP_S = {"bf16": 4e-3, "fp8": 1e-2}


class FlashVarlen(SuiteTriton):
    """One program per tile of a sequence's query rows; blocks of keys above the diagonal are skipped, only
    those on it are masked. q and k are multiplied in parts of 128 and 64, nothing is padded. FP8 operands go
    to FP8 products, the softmax weights rounded to FP8 too, scaled up to use the format's range.

    Equal inputs give equal bits at each call, however many compute units there are: one program sums all keys
    of a row, in order. Another configuration rounds elsewhere.
    """

    name = "triton.flash_varlen"
    Config = FlashConfig
    activations = "fp8"

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes("bf16", "fp8")(sizes)

    def configurations(self, target: Target, sizes: MhaPrefillSizes) -> Iterator[FlashConfig]:
        """Tiles of at most twice the rows of the longest sequence, and of at least an instruction's rows for
        each warp. Two programs of four warps on a compute unit fill each other's waits, one of eight halves
        what is read; steps of many keys wait less often."""
        longest = max(new for _, new in sizes.lengths())
        fp8 = sizes.dtype == "fp8"
        turned = (False, True) if turnable(target, sizes) else (False,)
        if target.kind == "rocm":
            # Eight warps are two waves of each SIMD without being told.
            tiles = [(64, 4, 0), (64, 4, 2), (128, 4, 0), (128, 4, 2), (128, 8, 0), (256, 8, 0)]
            keys: tuple[int, ...] = (32, 64, 128) if fp8 else (32, 64)
            instructions: tuple[int, ...] = (16, 32)
            stages: tuple[int, ...] = (1, 2) if target.arch == "gfx942" else (1, 2, 3)
        else:
            tiles = [(64, 4, 0), (128, 4, 0), (128, 8, 0)]
            keys, stages, instructions = (32, 64, 128), (2, 3, 4), (0,)
        for tile, step, deep, instruction, turn in product(tiles, keys, stages, instructions, turned):
            rows, warps, waves = tile
            # Scores and sums alone would fill a thread's registers.
            full = target.kind == "cuda" and rows * (step + VALUE) >= 256 * 32 * warps
            if rows < 2 * max(64, longest) and rows >= instruction * warps and not full:
                yield FlashConfig(rows, step, warps, deep, instruction, waves, turn)

    def heuristic(self, target: Target, sizes: MhaPrefillSizes) -> FlashConfig:
        """By architecture and dtype; half the rows where no sequence has more new tokens."""
        config = HEURISTIC.get(f"{target.arch} {sizes.dtype}") or HEURISTIC[f"{target.kind} {sizes.dtype}"]
        if target.kind != "cpu" and max(new for _, new in sizes.lengths()) <= 64:
            return replace(config, rows=64, warps=4, instruction=min(16, config.instruction))
        return config

    def features(self, sizes: MhaPrefillSizes) -> dict[str, float | str]:
        """Sums over the batch, and means of its sequences."""
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
        """Bytes of the list of programs, and of turned values and the list of their blocks."""
        programs = sizes.heads * (sizes.queries // 64 + sizes.batch)
        of_column = sizes.heads * VALUE + 1 if sizes.dtype == "fp8" else 0
        return 12 * programs + columns(sizes.keys, sizes.batch) * of_column

    def interpreted_s(self, sizes: MhaPrefillSizes) -> float:
        config = self.heuristic(CPU, sizes)
        steps = [
            math.ceil(min(prefix + first + config.rows, prefix + new) / config.keys)
            for prefix, new in sizes.lengths()
            for first in range(0, new, config.rows)
        ]
        return INTERPRETED_STEP_S[sizes.dtype] * sizes.heads * sum(n + 1 for n in steps)

    def prepare_with(
        self, config: FlashConfig, target: Target, operands: MhaPrefillOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        import torch
        import triton.language as tl

        from kernels.mha_prefill.triton.flash_jit import flash_kernel, turn_kernel

        prepared, launches = ConfiguredPrepared(operands, out), list[Call]()
        o, sizes, device = operands, operands.sizes, out.device
        q = prepared.readable(o.q)
        k = prepared.readable(o.k)
        v = prepared.readable(o.v)
        # How many threads share a row of scores in a matrix instruction, and its columns for each at a time.
        threads, run = (64 // config.instruction, 4) if config.instruction else (4, 2)
        width = columns(sizes.keys, sizes.batch)
        shared = {"HEADS": sizes.heads, "VALUE": VALUE, "PAD": PAD, "LANES": threads, "RUN": run}
        kind, headroom = "bf16", 0
        if o.is_fp8:
            require_format(sizes.fp8, target)
            kind, headroom = sizes.fp8, int(math.log2(fp8_format(sizes.fp8).max))
        if config.turned:
            # uint8 [heads * 128, width], FP8 codes as they are: sequence b begins at column
            # (cu_k[b] // PAD + b) * PAD and is filled up with zeros to a multiple of PAD.
            turned = torch.empty(sizes.heads * VALUE, width, dtype=torch.uint8, device=device)
            blocks = [(i, start) for i, s in enumerate(o.sequences) for start in range(0, s.length, PAD)]
            listed = torch.tensor(blocks, dtype=torch.int32, device=device)
            turn = turn_kernel[(sizes.heads, len(blocks))]
            arguments = (o.v.view(torch.uint8), turned, o.cu_k, listed, width)
            launches.append(functools.partial(turn, *arguments, **shared))
            v = turned.view(v.dtype)

        lengths = [(s.prefix, s.new) for s in o.sequences]
        programs = order(lengths, sizes.heads, config.rows, target, (WIDTH + VALUE) * BYTES[sizes.dtype])
        formats = {"bf16": tl.bfloat16, "e4m3fn": tl.float8e4nv, "e4m3fnuz": tl.float8e4b8}
        listed = torch.tensor(programs, dtype=torch.int32, device=device)
        tensors = (q, k, v, prepared.written, o.cu_q, o.cu_k, listed)
        scales = (o.scale * math.log2(math.e), o.q_descale, o.k_descale, o.v_descale)
        blocks_of = descriptors(q, k, v, config) if target.kind == "cuda" else (None,) * 5
        flash = functools.partial(
            flash_kernel[(len(programs),)],
            *(*tensors, *scales, width, *blocks_of),
            **shared,
            NOPE=NOPE,
            ROPE=ROPE,
            BLOCK_M=config.rows,
            BLOCK_N=config.keys,
            TURNED=config.turned,
            HEADROOM=headroom,
            PRODUCT=tl.float32 if prepared.interpreted else formats[kind],
            FNUZ_BITS=q.dtype == torch.uint8,
            **options(config.warps, config.stages, config.instruction),
            **({"waves_per_eu": config.waves} if config.waves else {}),
        )
        prepared.launches = [*launches, flash]
        return prepared


def descriptors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: FlashConfig
) -> list[TensorDescriptor]:
    """Descriptors of q, of k, each for the first 128 columns of a head and for its last 64, and of v, turned
    or not."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    parts = [
        (tensor.flatten(1), [rows, columns])
        for tensor, rows in ((q, config.rows), (k, config.keys))
        for columns in (NOPE, ROPE)
    ]
    of_v = (v, [VALUE, config.keys]) if config.turned else (v.flatten(1), [config.keys, VALUE])
    return [TensorDescriptor.from_tensor(tensor, block) for tensor, block in (*parts, of_v)]


class Tile(NamedTuple):
    """What one program takes: some query rows of one head of one sequence."""

    head: int
    sequence: int
    first: int


@dataclass(frozen=True)
class Cache:
    dies: int  # programs go to them in turn; each has a cache of its own
    bytes: int  # bytes of a die's cache that keys and values may fill


# H100: 50 MB of L2 (architecture white paper); MI300X and MI350X: 8 XCDs with 4 MB of L2 each (CDNA 3 and 4
# white papers), and consecutive programs go to consecutive XCDs (AITER's remap_xcd).
CACHES: Mapping[str, Cache] = {
    "cuda": Cache(1, 32 << 20),
    "rocm": Cache(8, 4 << 20),
    "cpu": Cache(1, 32 << 20),
}


def order(
    lengths: list[tuple[int, int]], heads: int, rows: int, target: Target, key_bytes: int
) -> list[Tile]:
    """All tiles of `rows` query rows.

    lengths:   (prefix, new) of each sequence
    key_bytes: of a key and its value, per head

    Each head of a sequence is dealt whole to the die with the least work so far, the longest first. On a die
    heads follow each other in sections of which the cache holds the keys and values, so that those come from
    memory once. Within a section the tiles with the most keys go first, so that none is left to run alone at
    the end.
    """
    cache = target.pick(CACHES)
    most = cache.bytes // key_bytes  # keys of a section, but for one of a single head
    work = [new * prefix + new * (new + 1) // 2 for prefix, new in lengths]  # pairs of a query and a key
    load = [(0, die) for die in range(cache.dies)]
    section, keys = [0] * cache.dies, [0] * cache.dies  # the last section of each die, and its keys so far
    queues: list[list[tuple[int, int, Tile]]] = [[] for _ in range(cache.dies)]
    for sequence in sorted(range(len(lengths)), key=lambda s: -work[s]):
        prefix, new = lengths[sequence]
        for head in range(heads):
            so_far, die = load[0]
            heapq.heapreplace(load, (so_far + work[sequence], die))
            if keys[die] and keys[die] + prefix + new > most:
                section[die], keys[die] = section[die] + 1, 0
            keys[die] += prefix + new
            for first in range(0, new, rows):
                queues[die].append((section[die], -(prefix + first), Tile(head, sequence, first)))
    for queue in queues:
        queue.sort(key=lambda placed: placed[:2])  # tiles of one place stay in order
    return [placed[-1] for turn in zip_longest(*queues) for placed in turn if placed is not None]
