"""Configurations of the grouped MoE: which there are for given sizes, and what each asks of a device."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels.formats import BLOCK
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.fused_moe.triton.align import segments_for
from kernels.tuning import Demand, Target
from shapes.routing import Routing


@dataclass(frozen=True)
class GroupedConfig:
    """What programs take, and which launches there are.

    rows:      pairs of one expert in a tile
    sort:      whether pairs are brought into the order of experts; else each is a tile of its own, and a
               launch less
    fuse:      whether the up product goes on to h: gate and up in one program, for the 128 columns of one
               scale, all of K. Else SiLU is a launch of its own
    columns:   of gate and up together, where not fused; they divide 128
    per_unit:  programs that the splits of K of the up product are to give each compute unit
    down:      columns of the down product
    by_token:  whether the down product adds up a token's picks, where not sorted; else a launch does
    swap:      whether tiles are computed transposed: NVIDIA's instructions take 64 rows at least
    chiplets:  that programs go round on AMD's GPUs, 1 elsewhere
    warps, stages: Triton's; instruction: rows of AMD's matrix instruction, 0 elsewhere
    """

    rows: int
    sort: bool = True
    fuse: bool = True
    columns: int = 128
    per_unit: int = 1
    down: int = 128
    by_token: bool = False
    swap: bool = False
    chiplets: int = 1
    warps: int = 4
    stages: int = 3
    instruction: int = 0


CHIPLETS = 8  # of gfx942 and gfx950
ROWS = (16, 32, 64, 128)
COMBINED = 1024  # columns of a program of the combine
FEW_COMBINED = 256  # of fewer than 32 tokens, of which a device would have too few programs
MIN_STEPS = 4  # blocks of K below which a split costs more than it brings: its part, and a pipeline to fill
MOST_PROGRAMS = 1216  # that splits make on any device: 304 compute units of an MI300X, four on each
MOST_GROUP = 8  # tiles that take a block of columns before the next
ALONE = (1.5, 4)  # pairs of an expert, on average and at most, whose weights tiles of one pair each may read
MANY = 8192  # blocks of h above which a program of SiLU takes eight

# By rows of an expert on average; by compiling and by demands, not yet from measuring.
HEURISTIC: dict[str, dict[float, GroupedConfig]] = {
    "cuda": {
        1.1: GroupedConfig(16, False, False, 64, 1, 64, by_token=True, swap=True, stages=5),
        16: GroupedConfig(16, swap=True, stages=3),
        32: GroupedConfig(32, swap=True, warps=8, stages=4),
        64: GroupedConfig(64, fuse=False, stages=4),
        math.inf: GroupedConfig(128, fuse=False, warps=8, stages=4),
    },
    "rocm": {
        1.1: GroupedConfig(
            16, False, False, 64, 1, 64, by_token=True, chiplets=CHIPLETS, stages=3, instruction=16
        ),
        16: GroupedConfig(16, chiplets=CHIPLETS, stages=2, instruction=16),
        32: GroupedConfig(32, chiplets=CHIPLETS, stages=2, instruction=16),
        64: GroupedConfig(64, fuse=False, chiplets=CHIPLETS, stages=2, instruction=16),
        math.inf: GroupedConfig(128, fuse=False, chiplets=CHIPLETS, stages=2, instruction=16),
    },
    # The interpreter's time is per program and per weight that it reads.
    "cpu": {
        16: GroupedConfig(16, down=1024),
        64: GroupedConfig(64, down=1024),
        math.inf: GroupedConfig(128, down=1024),
    },
}


def heuristic(target: Target, sizes: FusedMoeSizes) -> GroupedConfig:
    rows, alone = rows_of_expert(sizes), _alone(sizes)
    of_kind = target.pick(HEURISTIC).items()
    return next(config for most, config in of_kind if rows <= most and (config.sort or alone))


def configurations(target: Target, sizes: FusedMoeSizes) -> Iterator[GroupedConfig]:
    """Tiles between a quarter and twice an expert's rows on average. Numbers of splits that come to the same
    are given once."""
    mean = rows_of_expert(sizes)
    rows = [r for r in ROWS if r < 2 * max(16, mean) and r >= min(64, mean / 4)]
    few = _few(target, sizes) if _alone(sizes) else []
    for config in [*few, *itertools.chain.from_iterable(_sorted(target, sizes, r) for r in rows)]:
        small = config.rows < 64
        for warps in (4, 8) if config.sort else (4,):
            if target.kind == "rocm":
                for stages, instruction in itertools.product((2, 3) if small else (1, 2), (16, 32)):
                    # A stage is in registers; the up product holds more than the down product.
                    up = (config.rows + (2 * BLOCK if config.fuse else config.columns)) * BLOCK
                    fits = up * (stages - 1) <= target.shared
                    if fits and (config.rows >= 2 * instruction or instruction == 16):
                        on = replace(config, chiplets=CHIPLETS, instruction=instruction)
                        yield replace(on, warps=warps, stages=stages)
            else:
                for stages in (3, 4, 5) if small else (3, 4):
                    yield replace(config, warps=warps, stages=stages, swap=small)


def _alone(sizes: FusedMoeSizes) -> bool:
    """Whether nearly all pairs have an expert of their own."""
    mean, most = ALONE
    return rows_of_expert(sizes) <= mean and max(_loads(sizes.routed)) <= most


def _few(target: Target, sizes: FusedMoeSizes) -> Iterator[GroupedConfig]:
    for columns, down, by_token in itertools.product((64, 128), (64, 128), (True, False)):
        yield from _split(
            GroupedConfig(16, False, False, columns, 1, down, by_token), (1, 2, 4), target, sizes
        )


def _sorted(target: Target, sizes: FusedMoeSizes, rows: int) -> Iterator[GroupedConfig]:
    for down in (64, 128):
        yield GroupedConfig(rows, down=down)
        for columns in (64, 128):
            yield from _split(
                GroupedConfig(rows, fuse=False, columns=columns, down=down), (1, 2), target, sizes
            )


def _split(
    config: GroupedConfig, intensities: tuple[int, ...], target: Target, sizes: FusedMoeSizes
) -> Iterator[GroupedConfig]:
    seen: set[int] = set()
    for per_unit in intensities:
        config = replace(config, per_unit=per_unit)
        splits = splits_for(config, target.units, sizes)
        if splits not in seen:
            seen.add(splits)
            yield config


def rows_of_expert(sizes: FusedMoeSizes) -> float:
    """Of those that are hit, on average."""
    return sizes.routed.pairs / max(1, sizes.routed.hit)


@functools.lru_cache(maxsize=256)
def _loads(routed: Routing) -> tuple[int, ...]:
    return tuple(routed.loads())


def tiles_of(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """That have work to do, with the picks of the routing."""
    if not config.sort:
        return sizes.routed.pairs
    return sum(math.ceil(load / config.rows) for load in _loads(sizes.routed))


def up_columns(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """Blocks of columns of the up product."""
    return sizes.inter // BLOCK if config.fuse else 2 * sizes.inter // config.columns


def down_columns(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """The configuration's, or the most powers of two of 128 below them that divide hidden."""
    return next(n for n in (1024, 512, 256, 128, 64) if n <= config.down and sizes.hidden % n == 0)


def splits_for(config: GroupedConfig, units: int, sizes: FusedMoeSizes) -> int:
    """As many splits of the up product's K as give each compute unit the programs asked for, if K has enough
    blocks for them; none without a block."""
    if config.fuse:
        return 1
    blocks = sizes.hidden // BLOCK
    programs = max(1, tiles_of(config, sizes) * up_columns(config, sizes))
    most = min(units * config.per_unit, MOST_PROGRAMS)
    splits = max(1, min(most // programs, blocks // MIN_STEPS))
    return math.ceil(blocks / math.ceil(blocks / splits))


def most_splits(sizes: FusedMoeSizes) -> int:
    """Of any configuration on any device: there is a tile of at least a block of 128 for each expert that is
    hit, and for so many rows as the largest has."""
    tiles = max(sizes.routed.hit, sizes.routed.pairs // ROWS[-1])
    least = max(1, tiles * (2 * sizes.inter // BLOCK))
    return max(1, min(MOST_PROGRAMS // least, sizes.hidden // BLOCK // MIN_STEPS))


def group_for(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """Tiles that an expert has on average, which read the same weights: they go side by side."""
    mean = tiles_of(config, sizes) / max(1, sizes.routed.hit) if config.sort else 1
    return max(1, min(MOST_GROUP, round(mean)))


def combine_columns(sizes: FusedMoeSizes) -> int:
    """Of a program of the combine."""
    return COMBINED if sizes.tokens >= 32 else FEW_COMBINED


def silu_rows(sizes: FusedMoeSizes) -> int:
    """Pairs of a program of SiLU."""
    return 8 if sizes.tokens * sizes.picks * (sizes.inter // BLOCK) > MANY else 1


def features(sizes: FusedMoeSizes) -> dict[str, float | str]:
    """What decides: rows of an expert, how many are hit, and how large they are."""
    return {
        "rows": rows_of_expert(sizes),
        "hit": sizes.routed.hit,
        "hidden": sizes.hidden,
        "inter": sizes.inter,
        "fp8": sizes.fp8,
        "scales": sizes.scales,
    }


def demands(config: GroupedConfig, target: Target, sizes: FusedMoeSizes) -> list[Demand]:
    """Of all launches of a call, in their order. Rows that do not exist are multiplied, but not read."""
    pairs, tiles = sizes.routed.pairs, tiles_of(config, sizes)
    hidden, inter = sizes.hidden, sizes.inter
    ahead = max(1, config.stages - 1)
    splits = splits_for(config, target.units, sizes)
    part = 2 if splits == 1 else 4  # bytes of gate and up
    parts = 2 * inter * pairs * part * splits
    weights = sizes.routed.hit * inter * hidden

    blocks, width = math.ceil(hidden // BLOCK / splits), 2 * BLOCK if config.fuse else config.columns
    step = (pairs / max(1, tiles) + width) * BLOCK
    up = Demand(
        kernel="up_kernel",
        programs=tiles * up_columns(config, sizes) * splits,
        flops=2.0 * config.rows * width * BLOCK * blocks,
        dtype="fp8",
        read=step * blocks,
        in_flight=step * min(ahead, blocks),
        overlaps=config.stages > 1,
        moved=2 * weights + sizes.tokens * hidden + (pairs * inter if config.fuse else parts),
    )
    rows = silu_rows(sizes)
    read = rows * 2.0 * BLOCK * part * splits
    silu = Demand(
        "silu_kernel",
        math.ceil(pairs / rows) * (inter // BLOCK),
        0,
        "fp32",
        read,
        read,
        parts + pairs * inter,
    )

    down = down_columns(config, sizes)
    steps: float = inter // BLOCK
    if config.by_token:
        steps *= pairs / sizes.tokens
        step = (1 + down) * BLOCK
        programs, given = sizes.tokens * (hidden // down), 2 * sizes.tokens * hidden
    else:
        step = (pairs / max(1, tiles) + down) * BLOCK
        programs, given = tiles * (hidden // down), 2 * pairs * hidden
    product = Demand(
        kernel="down_by_token_kernel" if config.by_token else "down_kernel",
        programs=programs,
        flops=2.0 * config.rows * down * BLOCK * steps,
        dtype="fp8",
        read=step * steps,
        in_flight=step * min(ahead, steps),
        overlaps=config.stages > 1,
        moved=weights + pairs * inter + given,
    )
    launched = [up, product] if config.fuse else [up, silu, product]
    if not config.by_token:
        moved = 2 * hidden * (pairs + sizes.tokens)
        columns = combine_columns(sizes)
        programs = sizes.tokens * math.ceil(hidden / columns)
        read = 2.0 * columns * pairs / sizes.tokens
        launched.append(Demand("combine_kernel", programs, 0, "bf16", read, read, moved))
    return [*(_aligning(config, sizes) if config.sort else []), *launched]


def _aligning(config: GroupedConfig, sizes: FusedMoeSizes) -> Iterator[Demand]:
    """Every program scans ids: all of them, or those of its segment."""
    pairs = sizes.tokens * sizes.picks
    segments = segments_for(pairs)
    programs, read = sizes.local_experts * segments, 4.0 * pairs / segments
    demand = functools.partial(Demand, programs=programs, flops=0, dtype="fp32", in_flight=min(4096.0, read))
    if segments > 1:
        yield demand("count_kernel", read=read, moved=4.0 * (pairs + programs))
        yield demand("place_kernel", read=read + 4.0 * programs, moved=4.0 * (2 * pairs + programs))
    else:
        yield demand("place_kernel", read=2 * read, moved=8.0 * pairs)
