"""Operands of MHA prefill on which the usual mistakes show, whatever the sizes and in every row."""

from __future__ import annotations

from kernels.formats import Fp8Format, fp8_format
from kernels.lazy import torch
from kernels.mha_prefill.operands import MhaPrefillOperands, Sequence, guarded, sequences_of
from kernels.mha_prefill.sizes import NOPE, SCALE, VALUE, WIDTH, MhaPrefillSizes
from kernels.operands import Seeds, draw_normal

DRAWN = 4096  # tokens; further ones take the same numbers with other signs
# The largest magnitude that FP8 operands hold: eight deviations or more, so that none has to be clipped.
LARGEST = {"q": 64.0, "k": 12.0, "v": 8.0}
FAR = 4.0  # an ordinary key is so far below a landmark, along their channel


def generate(sizes: MhaPrefillSizes, seeds: Seeds, device: str, boundary: str = "core") -> MhaPrefillOperands:
    """The operands, a pure function of the arguments.

    - Temperature differs by head, from flat to peaked (in the odd heads scores deviate by 0.3 to 8), so that
      a wrong scale, a block that was not rescaled and a lost block show.
    - In the even, flat heads every query attends to certain keys: the first of its sequence, the last cached
      one, the first new one, and its own; and, where a mask lets them in, the key behind its own, the last of
      the sequence before and the first of the next. Each has as much weight as a sixteenth of the others,
      and so has a row of zeros that a mask lets in (see `_add_landmarks`).
    - Three channels are 2^17 times larger in k and 2^17 times smaller in q, three more 2^17 times larger in
      v: bf16 holds them, fp16 does not. (bf16 only: FP8 with one scale for the tensor does not either.)
    - FP8 operands are those of the same seeds quantised, with three different descales, none a power of two.
    - There are tokens of NaN before and behind q, k and v.

    Adversarial operands differ from those of the same seeds in these points:
    - Three channels that are the same for all keys add 120 to all scores of every fourth head, and subtract
      120 from those of another fourth (see kernels/mla_decode/generate.py).
    - Keys at the edges of tiles of 64 and 128, and of halves, are landmarks too.
    """
    lengths = sizes.lengths(seeds.stationary if seeds.lengths is None else seeds.lengths)
    sequences = sequences_of(lengths)
    generator = torch.Generator(device).manual_seed(1_000_003 * seeds.stationary + seeds.live)

    def normal(tokens: int, width: int) -> torch.Tensor:
        drawn = guarded(tokens, sizes.heads, width, device)
        draw_normal(drawn[:DRAWN], generator)
        for start in range(DRAWN, tokens, DRAWN):
            further = drawn[start : start + DRAWN]
            signs = torch.rand(sizes.heads, width, device=device, generator=generator).sub_(0.5).sign_()
            torch.mul(drawn[: len(further)], signs.to(drawn.dtype), out=further)
        return drawn

    q, k, v = normal(sizes.queries, WIDTH), normal(sizes.keys, WIDTH), normal(sizes.keys, VALUE)
    # scale * q.k deviates by 1 for normal q and k.
    temperature = torch.empty(sizes.heads, device=device)
    temperature[::2] = torch.logspace(-2, 0, len(temperature[::2]), base=2.0, device=device)
    peaked = torch.logspace(-1.75, 3, len(temperature[1::2]), base=2.0, device=device)
    temperature[1::2] = peaked[torch.randperm(len(peaked), generator=generator, device=device)]
    q *= temperature[:, None].to(q.dtype)
    _add_landmarks(q, k, sequences, seeds.adversarial)
    descales: dict[str, torch.Tensor] = {}
    if sizes.dtype == "fp8":
        fmt = fp8_format(sizes.fp8)
        if seeds.adversarial:
            _shift_scores(q, k, [0, 1, 2])
        descales = {
            f"{name}_descale": torch.full((1,), largest / fmt.max, device=device)
            for name, largest in LARGEST.items()
        }
        q, k, v = (
            _quantised(t, descale, fmt) for t, descale in zip((q, k, v), descales.values(), strict=True)
        )
    else:
        loud = torch.randperm(NOPE, generator=generator, device=device)[:3]
        q[..., loud] *= 2.0**-17
        k[..., loud] *= 2.0**17
        v[..., torch.randperm(VALUE, generator=generator, device=device)[:3]] *= 2.0**17
        if seeds.adversarial:
            _shift_scores(q, k, [c for c in range(6) if c not in loud.tolist()][:3])

    def starts(slices: list[slice]) -> torch.Tensor:
        return torch.tensor([0, *(s.stop for s in slices)], dtype=torch.int32, device=device)

    return MhaPrefillOperands(
        q=q,
        k=k,
        v=v,
        cu_q=starts([s.queries for s in sequences]),
        cu_k=starts([s.keys for s in sequences]),
        sequences=sequences,
        sizes=sizes,
    ).replaced(**descales)


def _quantised(values: torch.Tensor, descale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """bf16 [tokens, heads, width] in FP8, between guards; some tokens at a time."""
    tokens, heads, width = values.shape
    quantised = guarded(tokens, heads, width, values.device, fmt.dtype)
    for target, part in zip(quantised.split(DRAWN), values.split(DRAWN), strict=True):
        target.copy_(part / descale)
    return quantised


def _shift_scores(q: torch.Tensor, k: torch.Tensor, channels: list[int]) -> None:
    """Adds about 120 to all scores of heads 0, 4, 8 ... and subtracts it from those of heads 3, 7, 11 ...
    (with three heads or fewer, of all but the first); k holds the largest number that it has in FP8."""
    lowered = slice(3, None, 4) if q.shape[1] > 3 else slice(1, None)
    k[..., channels] = LARGEST["k"]
    q[..., channels] = 0.0
    of_heads = 120.0 / SCALE / len(channels) / LARGEST["k"]
    q[:, ::4, channels] = of_heads
    q[:, lowered, channels] = -of_heads


def _edges(length: int) -> list[int]:
    """Keys on both sides of the beginnings of the second and the last tiles of 64 and 128, and of the second
    half."""
    edges = {start for tile in (64, 128) for start in (tile, (length - 1) // tile * tile)} | {-(-length // 2)}
    return sorted({key for edge in edges for key in (edge - 1, edge) if 0 < key < length - 1})


def _add_landmarks(q: torch.Tensor, k: torch.Tensor, sequences: list[Sequence], adversarial: bool) -> None:
    """Sets the rope part of the even heads, which is in the scores and not in the values.

    Along its first channel an ordinary key is so far below 0 that it scores L less than a landmark (the first
    and the last of the cached keys and of the new ones) or a row of zeros. A query that sees n keys takes
    L = ln(n / 16), so that each landmark weighs as much as a sixteenth of the n. The other 63 channels of key
    j hold two random codes, its own and that of key j - 1. The query at j scores L more on the code of key j,
    which lifts the keys j and j + 1 to a landmark's score. Landmarks leave out their own code, so that their
    own query does not count them twice; the first key leaves out the other code too, which belongs to another
    sequence.
    """
    q_rope, k_rope = q[:, ::2, NOPE:], k[:, ::2, NOPE:]
    code = k_rope.clone()
    k_rope[1:] += code[:-1]
    k_rope[..., 0] = -FAR
    for sequence in sequences:
        begin, end, new = sequence.keys.start, sequence.keys.stop - 1, sequence.keys.start + sequence.prefix
        k_rope[[new, end]] = code[[new - 1, end - 1]]
        k_rope[begin] = 0.0
        k_rope[[begin, max(begin, new - 1), new, end], :, 0] = 0.0
        if adversarial:
            k_rope[[begin + key for key in _edges(sequence.length)], :, 0] = 0.0
        seen = torch.arange(sequence.prefix + 1, sequence.length + 1, device=q.device)
        lift = (seen / 16).log().clamp(min=0.5)[:, None, None] / SCALE
        own = code[sequence.keys][sequence.prefix :]
        q_rope[sequence.queries] = (own * (lift / (WIDTH - NOPE - 1))).to(q.dtype)
        q_rope[sequence.queries, :, 0] = (lift[..., 0] / FAR).to(q.dtype)
