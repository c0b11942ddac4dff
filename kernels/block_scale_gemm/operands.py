"""Sizes and operands of a block-scale GEMM, with values on which the usual mistakes show at any size.

Neighbouring block scales differ by a factor of 2 or more along M, N and K, so that a scale of the wrong block
changes the output. Codes look like quantised normal data, because a GPU's power depends on the values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from kernels.formats import (
    BLOCK,
    SCALES,
    SMALLEST_SCALE,
    Fp8Format,
    Scales,
    block_scale,
    fp8_format,
    known_scales,
    quantise_activations,
)
from kernels.lazy import torch
from kernels.operands import ABSENT, Operands, Seeds


@dataclass(frozen=True)
class BlockScaleGemmSizes:
    m: int  # tokens
    n: int  # output features
    k: int  # input features
    fp8: str = "e4m3fn"  # the format of a and b, or e4m3fnuz
    scales: str = "fp32"  # the scales of a and b; or ue8m0: powers of two, held as fp32

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"size {name}={getattr(self, name)} of block_scale_gemm must be at least 1")
        fp8_format(self.fp8)
        if self.scales not in SCALES:
            raise ValueError(f"size scales={self.scales!r} of block_scale_gemm must be {' or '.join(SCALES)}")

    @property
    def n_blocks(self) -> int:
        return -(-self.n // BLOCK)

    @property
    def k_blocks(self) -> int:
        return -(-self.k // BLOCK)

    @property
    def quantised_bytes(self) -> int:
        """The bytes of a_q and a_scale together."""
        return self.m * (self.k + 4 * self.k_blocks)


@dataclass
class BlockScaleGemmOperands(Operands):
    b_q: torch.Tensor  # FP8 [N, K]
    b_scale: torch.Tensor  # fp32 [ceil(N/128), ceil(K/128)]
    sizes: BlockScaleGemmSizes
    a_q: torch.Tensor = ABSENT  # FP8 [M, K]; core only
    a_scale: torch.Tensor = ABSENT  # fp32 [M, ceil(K/128)]; core only
    a: torch.Tensor = ABSENT  # bf16 [M, K]; with_quant only
    boundary: str = "core"

    live: ClassVar = ("a_q", "a_scale", "a")
    streamed: ClassVar = ("b_q", "b_scale")

    def narrowed(self) -> BlockScaleGemmOperands:
        if self.a is None:
            return super().narrowed()
        a_q = torch.empty_like(self.a, dtype=self.b_q.dtype)
        a_scale = torch.empty(self.sizes.m, self.sizes.k_blocks, dtype=torch.float32, device=self.a.device)
        return self.replaced(a=None, a_q=a_q, a_scale=a_scale, boundary="core")


# Normal values are drawn once and repeated. Both counts are prime, so that no two rows begin at the same
# place of the draw unless there are more rows than that.
WEIGHT_VALUES = 4_194_301
ACTIVATION_BLOCKS = 16_381
ROWS = 1024  # rows of activations that are handled at a time

# The format's largest value in standard deviations of weights: about the largest of 128x128 normal values.
MAX_DEVIATIONS = 4.3
TYPICAL_SCALE = 2.0**-12  # of the weights
OUTLIER_CHANNELS = 4  # columns of a
# Row 58 and every 61st row after it are zero. 61 is odd, so that these rows are of all kinds modulo 8.
FIRST_ZERO_ROW, ZERO_ROW_PERIOD = 58, 61


def generate(
    sizes: BlockScaleGemmSizes, seeds: Seeds, device: str, boundary: str = "core"
) -> BlockScaleGemmOperands:
    """The operands of a case; equal arguments give equal operands. For adversarial seeds see
    `_spoil_weights` and `_spoil_activations`."""
    fmt, scales = fp8_format(sizes.fp8), known_scales(sizes.scales)
    live_seed = 1_000_003 * seeds.stationary + seeds.live
    b_q, b_scale = weights(sizes.n, sizes.k, fmt, scales, seeds.stationary, device)
    a = activations(sizes.m, sizes.k, live_seed, device)
    if seeds.adversarial:
        _spoil_weights(b_q, b_scale, fmt, scales, seeds.stationary)
        _spoil_activations(a, fmt, live_seed)
    wide = BlockScaleGemmOperands(b_q, b_scale, sizes, a=a, boundary="with_quant")
    if boundary == "with_quant":
        return wide
    core = wide.narrowed()
    for first in range(0, sizes.m, ROWS):
        rows = slice(first, first + ROWS)
        core.a_q[rows], core.a_scale[rows] = quantise_activations(a[rows], fmt, scales)
    return core


def weights(
    n: int, k: int, fmt: Fp8Format, scales: Scales, seed: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """b_q FP8 [N, K] and b_scale fp32 [ceil(N/128), ceil(K/128)].

    A scale lies on one of three levels 1.1 octaves apart, chosen by (block of N - block of K) modulo 3, and
    is moved by up to 0.05 octaves. So neighbours differ by at least 1 octave, the transposed table is a
    different one, and no block is so small that the others hide it.
    """
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(min(WEIGHT_VALUES, n * k), device=device).normal_(generator=generator)
    values = values.mul_(fmt.max / MAX_DEVIATIONS).clamp_(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    b_q = torch.empty(n * k, dtype=torch.uint8, device=device)
    for piece in b_q.split(len(values)):
        piece.copy_(values[: len(piece)])

    block_n = torch.arange(-(-n // BLOCK), device=device)[:, None]
    block_k = torch.arange(-(-k // BLOCK), device=device)
    b_scale = _weight_scales(1.1 * ((block_n - block_k) % 3 - 1), fmt, scales, generator)
    return b_q.view(fmt.dtype).view(n, k), b_scale


def _weight_scales(
    octaves: torch.Tensor, fmt: Fp8Format, scales: Scales, generator: torch.Generator
) -> torch.Tensor:
    """Scales that lie so many octaves above TYPICAL_SCALE, moved by up to 0.05 octaves."""
    moved = torch.empty(octaves.shape, device=octaves.device).uniform_(-0.05, 0.05, generator=generator)
    magnitudes = (octaves + moved).exp2() * TYPICAL_SCALE * fmt.max  # of the largest values of blocks
    return block_scale(magnitudes, fmt, scales)


def activations(m: int, k: int, seed: int, device: str) -> torch.Tensor:
    """bf16 [M, K]: normal values in blocks of 128 with the magnitudes of `_magnitudes`, and outliers.

    The even rows, and with them the only row of a decode step of one token, have magnitudes that alternate
    between two levels an octave apart: in them a mistake in any block of K shows. The odd rows differ by row
    modulo 8: they are large in a few blocks (1), have outlier channels of 2^10 to 2^13 times the rest (3),
    range over 18 octaves (5), or have blocks of zeros (7). One row in 61 is zero. The magnitudes of
    neighbouring rows lie 14 or 21 octaves apart.
    """
    generator = torch.Generator(device).manual_seed(seed)
    blocks = -(-k // BLOCK)
    pool = torch.empty(min(ACTIVATION_BLOCKS, m * blocks), BLOCK, device=device).normal_(generator=generator)
    pool /= pool.abs().amax(1, keepdim=True)
    magnitude = _magnitudes(m, blocks, generator)
    channels = torch.randperm(k, generator=generator, device=device)[:OUTLIER_CHANNELS]
    outlier = torch.empty(m, len(channels), device=device).uniform_(10, 13, generator=generator).exp2_()
    outlier[torch.arange(m, device=device) % 8 != 3] = 1.0

    a = torch.empty(m, k, dtype=torch.bfloat16, device=device)
    for first in range(0, m, ROWS):
        rows = slice(first, min(first + ROWS, m))
        index = torch.arange(rows.start * blocks, rows.stop * blocks, device=device) % len(pool)
        values = pool[index].view(-1, blocks, BLOCK)
        width_of_last = k - (blocks - 1) * BLOCK
        if width_of_last < BLOCK:
            values[:, -1] /= values[:, -1, :width_of_last].abs().amax(-1, keepdim=True)
        values = values.mul_(magnitude[rows].unsqueeze(-1)).flatten(1)[:, :k]
        values[:, channels] *= outlier[rows]
        a[rows] = values
    return a


def _magnitudes(m: int, blocks: int, generator: torch.Generator) -> torch.Tensor:
    """The largest magnitude of each block, fp32 [M, blocks], as `activations` describes them."""
    uniform = functools.partial(torch.rand, generator=generator, device=generator.device)
    row = torch.arange(m, device=generator.device)[:, None]
    block = torch.arange(blocks, device=generator.device)
    # Rows lie on five levels 7 octaves apart, neighbours two or three levels apart.
    octaves = 7.0 * ((2 * row + 2) % 5 - 2) + uniform(m, 1)
    octaves = octaves + 1.1 * ((row + block) % 2) + 0.1 * uniform(m, blocks)
    draw = uniform(m, blocks)
    # Large blocks are about two of a row, or a twentieth of it if that is more.
    is_large = (row % 8 == 1) & (draw < max(0.05, 2 / blocks))
    octaves += torch.where(is_large, 6.0, 0.0)
    # Seven levels 3 octaves apart; steps of five go round all of them.
    octaves += torch.where(row % 8 == 5, 3.0 * (5 * block % 7 - 3), 0.0)
    is_zero = ((row % 8 == 7) & (draw < 0.3)) | (row % ZERO_ROW_PERIOD == FIRST_ZERO_ROW)
    return octaves.exp2_().masked_fill_(is_zero, 0.0)


def _spoil_weights(
    b_q: torch.Tensor, b_scale: torch.Tensor, fmt: Fp8Format, scales: Scales, seed: int
) -> None:
    """Changes the weights in place:

    - Scales lie on five levels 0.55 octaves apart, not on three, so that reading the table three blocks too
      far gives other scales. Neighbours lie two or three levels apart, thus still at least 1 octave.
    - One column in 16 has only codes of the largest magnitude. No column has only zeros or only subnormal
      codes: vLLM 0.33's CPU kernels read those as values of up to 2^-7 (csrc/cpu/sgl-kernels/vec.h), which
      shows in no column that has other codes.
    - Where K and N have four blocks, block (3, 3) is zero and has the smallest scale.
    """
    generator = torch.Generator(b_q.device).manual_seed(seed + 1)
    codes = b_q.view(torch.uint8)
    n, k = codes.shape

    largest = torch.tensor([fmt.max], device=b_q.device).to(fmt.dtype).view(torch.uint8)
    extreme = codes[3::16]
    signs = torch.randint(0, 2, extreme.shape, generator=generator, device=b_q.device, dtype=torch.uint8)
    extreme.copy_(largest | signs << 7)
    block_n = torch.arange(b_scale.shape[0], device=b_q.device)[:, None]
    block_k = torch.arange(b_scale.shape[1], device=b_q.device)
    b_scale.copy_(_weight_scales(0.55 * ((2 * block_n + 3 * block_k) % 5 - 2), fmt, scales, generator))
    if n > 3 * BLOCK and k > 3 * BLOCK:
        codes[3 * BLOCK : 4 * BLOCK, 3 * BLOCK : 4 * BLOCK] = 0
        b_scale[3, 3] = SMALLEST_SCALE


def _spoil_activations(a: torch.Tensor, fmt: Fp8Format, seed: int) -> None:
    """Changes the activations in place, each row in the way of its number modulo 8."""
    k = a.shape[1]
    blocks = -(-k // BLOCK)
    channel = torch.arange(k, device=a.device)
    block, in_block = channel // BLOCK, channel % BLOCK

    # 0 and 4: the blocks where splits of K begin and end (of the whole, of halves and of a quarter) are 2^5
    # times larger, so that the loss of one of them exceeds the noise of rounding to FP8. The first and the
    # last value are twice the row's maximum, so that a wrong mask shows.
    edges_of_splits = [0, blocks - 1, blocks // 2 - 1, blocks // 2, blocks // 4]
    is_at_edge = torch.isin(block, torch.tensor(edges_of_splits, device=a.device))
    a[0::4] = torch.where(is_at_edge, a[0::4] * 2.0**5, a[0::4])
    edge_value = 2 * a[0::4].abs().amax(1)
    a[0::4, 0], a[0::4, -1] = edge_value, -edge_value
    # The scales of rows 0 and 4 are beyond the range of fp16. A quantiser that takes no magnitude below 1
    # loses row 4. One that takes none below 1e-4, as DeepGEMM does, keeps it.
    a[0::8] *= 2.0**24
    a[4::8] *= 2.0**-12
    # 1: sums overflow fp16.
    a[1::8] *= 2.0**17
    # 2: the largest value of a block stands first in even blocks and last in odd ones.
    last_in_block = (k - block * BLOCK).clamp(max=BLOCK) - 1
    _put_ties(a[2::8], in_block == torch.where(block % 2 == 0, 0, last_in_block), fmt, seed)
    # 3: the values of each block span 20 octaves, so that most are subnormal once they are quantised. Steps
    # of 37 go round all 128 places, so that large and small values alternate.
    a[3::8] *= torch.exp2(-20.0 * ((37 * in_block) % BLOCK) / BLOCK).to(a.dtype)
    # 5: every third block is zero, with -0 among the zeros; the block after it is 2^6 times larger.
    a[5::8] = torch.where(block % 3 == 1, a[5::8] * 2.0**6, a[5::8])
    a[5::8] = torch.where(block % 3 == 0, a[5::8] * 0.0, a[5::8])
    # 6: each second block is the negative of the block before it. In a kernel that multiplies both by the
    # weights and scales of one block, their sums cancel.
    pairs, rows = k // (2 * BLOCK), a[6::8]
    if pairs and len(rows):
        pair = rows[:, : 2 * BLOCK * pairs].unflatten(1, (pairs, 2, BLOCK))
        pair[:, :, 1] = -pair[:, :, 0]
    a[7::8] = 0.0


def _put_ties(rows: torch.Tensor, is_largest: torch.Tensor, fmt: Fp8Format, seed: int) -> None:
    """Changes the magnitudes of rows [m, K] in place. Those that `is_largest` [K] marks become the format's
    largest value times a power of two; others at most an eighth, a quarter of them halfway between codes."""
    generator = torch.Generator(rows.device).manual_seed(seed + 1)
    # Both formats' largest values are about 2^8, so that the largest of a row stays about as large.
    exponent = torch.frexp(rows.float().abs().amax(1, keepdim=True)).exponent - 8
    draw = torch.empty(rows.shape, device=rows.device)
    size = fmt.max / 8 * draw.uniform_(0.1, 1.0, generator=generator)
    # Codes lie 2 apart from 16 to 32, and 4 apart from 32 to 64. An eighth of e4m3fnuz's 240 is below 34.
    ties = (17.0, 34.0) if fmt.max / 8 >= 34.0 else (17.0, 17.0)
    tie = torch.where(draw.uniform_(0, 1, generator=generator) < 0.5, ties[1], ties[0])
    is_tie = draw.uniform_(0, 1, generator=generator) < 0.25
    size = torch.where(is_largest, fmt.max, torch.where(is_tie, tie, size))
    rows.copy_(torch.ldexp(size.copysign(rows.float()), exponent))
