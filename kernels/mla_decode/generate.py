"""Operands of MLA decode on which the usual mistakes show, whatever the sizes."""

from __future__ import annotations

import math
import random

from kernels.formats import fp8_format
from kernels.lazy import torch
from kernels.mla_decode.operands import KV_SCALE, SPARE_PAGES, MlaDecodeOperands
from kernels.mla_decode.sizes import KV_BYTES, LATENT, ROPE, WIDTH, MlaDecodeSizes
from kernels.operands import Seeds, draw_normal

CONSTANT = WIDTH - 1
"""The channel with which adversarial operands shift scores."""

OF_TOKENS, OF_HEADS = 8.0, 208.0
"""The values of that channel in kv and in q. Their product times the scale is 120."""

PAGES = (1 << 15) + (1 << 12)
"""A number of pages of which an eighth have numbers that a signed integer of 16 bits cannot hold."""

MOST_BYTES = 200 << 20
"""The most bytes that a cache of so many pages may take."""


def generate(sizes: MlaDecodeSizes, seeds: Seeds, device: str, boundary: str = "core") -> MlaDecodeOperands:
    """The operands, a pure function of the arguments.

    - Temperature differs by head, from flat to peaked (scores deviate by 0.3 to 8), so that a wrong scale, a
      combine without rescaling and a lost page show.
    - The first and the last token of each sequence are landmarks: every other head gives each at most a
      sixteenth of the weight of the others, and as much to a row of zeros that a mask lets in, so that a
      length off by one shows at any context. The other heads do not, so that a lost page shows in them.
    - Three latent channels are 2^17 times larger in kv and 2^17 times smaller in q: bf16 holds them, fp16
      does not (bf16 cache only; e4m3 ends at 448).
    - Pages are shuffled; each slot without a token is NaN, and so is the page that pads the table.

    Adversarial operands differ from those of the same seeds in these points:
    - A rope channel that is the same for all tokens adds 120 to all scores of every fourth head, and
      subtracts 120 from those of another fourth: softmax without its maximum overflows, one that starts from
      a maximum of 0 underflows, a masked token of score 0 has all the weight, and fp16 has only 4 bits left
      for fractions.
    - There are landmarks at the edges of pages and of halves too (see `_landmarks`).
    - No head is peaked on an FP8 cache: a row's largest weight, 1, has no error, and where it is most of the
      sum nothing shows how the others are rounded.
    - There are so many small pages that their numbers exceed 16 bits.
    """
    lengths = sizes.lengths(seeds.stationary if seeds.lengths is None else seeds.lengths)
    counts = [-(-n // sizes.page) for n in lengths]
    total = sum(counts) + SPARE_PAGES
    if seeds.adversarial and PAGES * sizes.page * WIDTH * KV_BYTES[sizes.kv] <= MOST_BYTES:
        total = max(total, PAGES)
    pages = list(range(total))
    random.Random(seeds.stationary).shuffle(pages)
    poison, free = pages[0], iter(pages[1:])
    width = max(counts) + 1
    table = [[next(free) for _ in range(n)] + [poison] * (width - n) for n in counts]

    generator = torch.Generator(device).manual_seed(1_000_003 * seeds.stationary + seeds.live)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        drawn = torch.empty(shape, dtype=dtype, device=device)
        draw_normal(drawn, generator)
        return drawn

    q, kv = (
        normal(sizes.batch, sizes.heads, WIDTH),
        normal(total, sizes.page, WIDTH, dtype=torch.bfloat16),
    )
    operands = MlaDecodeOperands(
        q=q,
        kv=kv,
        page_table=torch.tensor(table, dtype=torch.int32, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        host_lengths=lengths,
        kv_scale=1.0,
        sizes=sizes,
    )
    # scale * q.kv has deviation sqrt(576/192) = 1.73 for normal q and kv.
    hottest = 0.0 if seeds.adversarial and sizes.kv == "fp8" else 2.2
    temperature = torch.logspace(-2.5, hottest, sizes.heads, base=2.0, device=device)
    q *= temperature[torch.randperm(sizes.heads, generator=generator, device=device)][None, :, None]
    direction = normal(sizes.batch, ROPE)
    if seeds.adversarial:
        direction[:, CONSTANT - LATENT] = 0.0
    _add_landmarks(operands, direction, seeds.adversarial)
    if seeds.adversarial:
        _shift_scores(operands)
    if sizes.kv == "bf16":
        channels = torch.randperm(LATENT, generator=generator, device=device)[:3]
        q[..., channels] *= 2.0**-17
        kv[..., channels] *= 2.0**17
    operands.q = q.bfloat16()
    kv.view(-1, WIDTH)[operands.unused_slots()] = float("nan")
    if sizes.kv == "fp8":
        fmt = fp8_format(sizes.fp8)
        operands.kv_scale = KV_SCALE[sizes.fp8]
        operands.kv = (kv.float() / operands.kv_scale).clamp(-fmt.max, fmt.max).to(fmt.dtype)
    return operands


def _shift_scores(operands: MlaDecodeOperands) -> None:
    """Adds 120 to all scores of heads 0, 4, 8 ... and subtracts it from those of heads 3, 7, 11 ... (with
    three heads or fewer, of all but the first). Both FP8 formats hold both factors."""
    lowered = slice(3, None, 4) if operands.q.shape[1] > 3 else slice(1, None)
    operands.kv[..., CONSTANT] = OF_TOKENS
    operands.q[..., CONSTANT] = 0.0
    operands.q[:, ::4, CONSTANT] = OF_HEADS
    operands.q[:, lowered, CONSTANT] = -OF_HEADS


def _landmarks(length: int, page: int, adversarial: bool) -> list[int]:
    """Tokens that half of the heads attend to: the first and the last; with adversarial operands also those
    on both sides of where the second page, the last page and the second half of the sequence begin."""
    edges = (page, (length - 1) // page * page, -(-length // 2)) if adversarial else ()
    found = {0, length - 1, *(t for edge in edges for t in (edge - 1, edge) if 0 <= t < length)}
    return sorted(found)


def _add_landmarks(operands: MlaDecodeOperands, direction: torch.Tensor, adversarial: bool) -> None:
    """Makes every other head attend to the landmarks of each sequence.

    direction: [batch, 64], normalised to u, in the rope part, which is in the scores and not in the values.
    Along u, q becomes 4 in the even heads and 0 in the odd ones, a landmark row becomes 0, and any other row
    so far below 0 that it scores ln(length / 16) less than a landmark. A row of zeros scores like a landmark.
    """
    unit = direction / direction.norm(dim=-1, keepdim=True)
    q_rope = operands.q[..., LATENT:]
    q_rope -= (q_rope @ unit[:, :, None]) * unit[:, None, :]
    q_rope[:, ::2] += 4.0 * unit[:, None, :]
    flat = operands.kv.view(-1, WIDTH)
    for sequence, length in enumerate(operands.host_lengths):
        u, slots = unit[sequence], operands.token_slots(sequence)
        below = torch.full((length,), max(0.0, math.log(length / 16)) / operands.scale / 4.0, device=u.device)
        below[_landmarks(length, operands.page, adversarial)] = 0.0
        rope = flat[slots, LATENT:].float()
        flat[slots, LATENT:] = (rope - (rope @ u + below)[:, None] * u).to(flat.dtype)
