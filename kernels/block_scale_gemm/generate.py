"""Operands of block-scale GEMM on which the usual mistakes show, whatever the sizes.

Neighbouring block scales differ by a factor of 2 or more, along M, N and K alike, so that a scale taken
from the wrong block is seen; codes look like quantised normal data, whose values decide a GPU's power.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import (
    BLOCK,
    Fp8Format,
    Scales,
    block_scale,
    fp8_format,
    known_scales,
    quantise_activations,
)
from kernels.operands import Seeds

if TYPE_CHECKING:
    import torch

# Normal values are drawn once and laid end to end. Both numbers are prime, so that rows start at other
# places of them as long as there are fewer rows.
WEIGHT_VALUES = 4_194_301
ACTIVATION_BLOCKS = 16_381
ROWS = 1024  # handled at a time

DEVIATIONS = 4.3  # of normal weights that make the format's largest value: about what 128x128 of them reach
TYPICAL_SCALE = 2.0**-12
OUTLIER_CHANNELS = 4
ZERO_ROW = 61  # one row in so many


def generate(
    sizes: BlockScaleGemmSizes, seeds: Seeds, device: str, boundary: str = "core"
) -> BlockScaleGemmOperands:
    """A pure function of its arguments."""
    fmt, scales = fp8_format(sizes.fp8), known_scales(sizes.scales)
    b_q, b_scale = weights(sizes.n, sizes.k, fmt, scales, seeds.stationary, device)
    a = activations(sizes.m, sizes.k, 1_000_003 * seeds.stationary + seeds.live, device)
    wide = BlockScaleGemmOperands(b_q, b_scale, scales, sizes, a=a, boundary="with_quant")
    if boundary == "with_quant":
        return wide
    core = wide.narrowed()
    quantise(a, core.a_q, core.a_scale, fmt, scales)
    return core


def weights(
    n: int, k: int, fmt: Fp8Format, scales: Scales, seed: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """b_q FP8 [N, K] and b_scale fp32 [ceil(N/128), ceil(K/128)].

    Scales lie on three levels 1.1 octaves apart, by (block of N - block of K) modulo 3, each off by up to
    0.05 octaves. So neighbours differ by 1 octave at least, a transposed table is another one, and no block
    is so small that the others hide it.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(min(WEIGHT_VALUES, n * k), device=device).normal_(generator=generator)
    values = values.mul_(fmt.max / DEVIATIONS).clamp_(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    b_q = torch.empty(n * k, dtype=torch.uint8, device=device)
    for part in b_q.split(len(values)):
        part.copy_(values[: len(part)])

    block_n, block_k = (torch.arange(-(-size // BLOCK), device=device) for size in (n, k))
    level = 1.1 * ((block_n[:, None] - block_k) % 3 - 1)
    level += torch.empty(level.shape, device=device).uniform_(-0.05, 0.05, generator=generator)
    return b_q.view(fmt.dtype).view(n, k), block_scale(level.exp2() * TYPICAL_SCALE * fmt.max, fmt, scales)


def activations(m: int, k: int, seed: int, device: str) -> torch.Tensor:
    """bf16 [M, K], of normal blocks of 128 brought to the magnitudes of `_octaves`, and outliers.

    Every second row is flat but for neighbouring blocks, which differ by an octave: in it a mistake in any
    block of K is visible. The first is, which is all that a decode step of one token has. The others in
    turn are hot in a few blocks, have outlier channels (the same ones) of 2^10 to 2^13 times the rest,
    range over 18 octaves, or have blocks of zeros; one row in 61 is zero altogether. Neighbouring rows lie
    14 or 21 octaves apart.
    """
    import torch

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
        if kept := k % BLOCK:
            values[:, -1] /= values[:, -1, :kept].abs().amax(-1, keepdim=True)
        values = values.mul_(magnitude[rows].unsqueeze(-1)).flatten(1)[:, :k]
        values[:, channels] *= outlier[rows]
        a[rows] = values
    return a


def _magnitudes(m: int, blocks: int, generator: torch.Generator) -> torch.Tensor:
    """The largest value of each block: fp32 [M, blocks]."""
    import torch

    device = generator.device
    row = torch.arange(m, device=device)[:, None]
    block = torch.arange(blocks, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device).uniform_(generator=generator)

    octaves = 7.0 * ((2 * row + 2) % 5 - 2) + uniform(m, 1)
    octaves = octaves + 1.1 * ((row + block) % 2) + 0.1 * uniform(m, blocks)
    chance = uniform(m, blocks)
    kind = row % 8
    octaves += torch.where((kind == 1) & (chance < max(0.05, 2 / blocks)), 6.0, 0.0)
    octaves += torch.where(kind == 5, 3.0 * (5 * block % 7 - 3), 0.0)
    zero = ((kind == 7) & (chance < 0.3)) | (row % ZERO_ROW == ZERO_ROW - 3)
    return octaves.exp2_().masked_fill_(zero, 0.0)


def quantise(
    a: torch.Tensor, a_q: torch.Tensor, a_scale: torch.Tensor, fmt: Fp8Format, scales: Scales
) -> None:
    """a [M, K] into a_q and a_scale, some rows at a time."""
    for x, q, scale in zip(a.split(ROWS), a_q.split(ROWS), a_scale.split(ROWS), strict=True):
        new_q, new_scale = quantise_activations(x, fmt, scales)
        q.copy_(new_q)
        scale.copy_(new_scale)
