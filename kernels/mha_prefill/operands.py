"""Sizes and operands of an MHA prefill: tensors on which the usual mistakes show in every row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kernels.attention import SCALE, check_sizes, edges, shift_scores
from kernels.formats import fp8_format
from kernels.lazy import torch
from kernels.operands import ABSENT, Operands, Seeds, draw_normal
from kernels.support import Support, need
from shapes.lengths import parse_span, spread

NOPE = 128
ROPE = 64
WIDTH = NOPE + ROPE
VALUE = 128


@dataclass(frozen=True)
class MhaPrefillSizes:
    batch: int  # sequences
    new: str  # new tokens of each sequence, its queries: one number or low..high, spread evenly
    prefix: str = "0"  # tokens of each sequence that are cached before the new ones, given in the same way
    heads: int = 16  # of the rank
    dtype: str = "bf16"  # of q, k and v: bf16 or fp8
    fp8: str = "e4m3fn"  # the format of FP8 operands; a bf16 case does not name it

    def __post_init__(self) -> None:
        check_sizes("mha_prefill", self, ("batch", "heads"), "dtype")
        parse_span(self.new)
        parse_span(self.prefix, least=0)

    def lengths(self, seed: int = 0) -> list[tuple[int, int]]:
        """(prefix, new) of each sequence. Every seed gives the same pairs, in another order."""
        # With equal seeds, the sequence with the longest prefix would have the most new tokens, and so on.
        prefixes = spread(parse_span(self.prefix, least=0), self.batch, seed + self.batch // 2)
        new = spread(parse_span(self.new), self.batch, seed)
        return list(zip(prefixes, new, strict=True))

    @property
    def queries(self) -> int:
        return sum(new for _, new in self.lengths())

    @property
    def keys(self) -> int:
        return sum(prefix + new for prefix, new in self.lengths())

    @property
    def most_new(self) -> int:
        return max(new for _, new in self.lengths())

    @property
    def most_keys(self) -> int:
        return max(prefix + new for prefix, new in self.lengths())

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to, per head."""
        return sum(new * prefix + new * (new + 1) // 2 for prefix, new in self.lengths())


def takes(*dtypes: str) -> Callable[[MhaPrefillSizes], Support]:
    """The function that a row declares as `fits` if it takes these dtypes."""
    return lambda sizes: need(sizes.dtype in dtypes, f"takes dtype={' or '.join(dtypes)}, not {sizes.dtype}")


GUARD = 256  # tokens of NaN before and behind q, k and v: at least what a kernel's tile reads at once


class Sequence(NamedTuple):
    queries: slice  # its rows of q and of the output
    keys: slice  # its rows of k and v, the cached ones first
    prefix: int  # how many keys are cached

    @property
    def new(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def length(self) -> int:
        return self.keys.stop - self.keys.start


@dataclass
class MhaPrefillOperands(Operands):
    """Nothing is streamed: in serving, the q_b and kv_b products of the same layer have just written q, k and
    v (of cached tokens too, because an engine caches their latents alone). So the last-level cache holds as
    much of them in serving as it holds here from the call before."""

    q: torch.Tensor  # bf16 or FP8 [T, heads, 192], for the T new tokens of all sequences
    k: torch.Tensor  # bf16 or FP8 [S, heads, 192], for all S tokens, by sequence, cached tokens first
    v: torch.Tensor  # bf16 or FP8 [S, heads, 128]
    cu_q: torch.Tensor  # int32 [batch + 1]: sequence b has rows cu_q[b] .. cu_q[b + 1] of q
    cu_k: torch.Tensor  # int32 [batch + 1]: the same for the rows of k and v
    sequences: list[Sequence]  # the same, on the host
    sizes: MhaPrefillSizes
    scale: float = SCALE
    # fp32 [1], by which a stored value is to be multiplied; None for bf16. Stationary: calibrated once, as
    # engines hold the scales of an FP8 cache.
    q_descale: torch.Tensor = ABSENT
    k_descale: torch.Tensor = ABSENT
    v_descale: torch.Tensor = ABSENT
    boundary: str = "core"

    live: ClassVar = ("q", "k", "v")
    streamed: ClassVar = ()

    @property
    def is_fp8(self) -> bool:
        return self.q.element_size() == 1

    @property
    def without_effect(self) -> frozenset[str]:
        """q and k, where each sequence has one key: the weight of that is 1, whatever its score."""
        return frozenset({"q", "k"}) if self.sizes.most_keys == 1 else frozenset()

    @property
    def descales(self) -> dict[str, torch.Tensor]:
        """The descales by the names of these attributes; empty for bf16."""
        return {name: tensor for name, tensor in self.tensors().items() if name.endswith("_descale")}

    @property
    def score_scale(self) -> float:
        """Factor that turns the product of a stored q and a stored k into a score."""
        if self.q_descale is None:
            return self.scale
        return self.scale * float(self.q_descale) * float(self.k_descale)

    @property
    def value_scale(self) -> float:
        """Factor by which a stored v is to be multiplied."""
        return 1.0 if self.v_descale is None else float(self.v_descale)

    def copy(self, names: Iterable[str] | None = None) -> MhaPrefillOperands:
        """The copy has guards of its own."""
        copied = super().copy(names)
        for name in self.live:
            tensor = getattr(copied, name)
            if tensor is not getattr(self, name):
                own = guarded(tensor.shape, tensor.device, tensor.dtype)
                setattr(copied, name, own.copy_(tensor))
        return copied

    def guarded_tensors(self) -> Iterable[torch.Tensor]:
        """All tensors, the live ones with their guards: so that `digest` covers these."""
        return [with_guards(t) if name in self.live else t for name, t in self.tensors().items()]


def with_guards(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [GUARD + tokens + GUARD, heads, width] that holds a tensor of `guarded` and its guards."""
    stride = tensor.stride(0)
    shape = (tensor.shape[0] + 2 * GUARD, *tensor.shape[1:])
    return tensor.as_strided(shape, tensor.stride(), tensor.storage_offset() - GUARD * stride)


def guarded(shape: Iterable[int], device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor [tokens, heads, width] between guards: tokens of NaN, which show a read past an end."""
    tokens, *of_token = shape
    storage = torch.empty(GUARD + tokens + GUARD, *of_token, dtype=dtype, device=device)
    nan = torch.tensor(torch.nan, device=device)
    storage[:GUARD].copy_(nan)
    storage[GUARD + tokens :].copy_(nan)
    return storage[GUARD : GUARD + tokens]


def empty(sizes: MhaPrefillSizes, lengths: list[tuple[int, int]], device: str) -> MhaPrefillOperands:
    """The operands for sequences of (prefix, new) tokens, without values of q, k, v and their descales."""
    cu_q = [0, *itertools.accumulate(new for _, new in lengths)]
    cu_k = [0, *itertools.accumulate(prefix + new for prefix, new in lengths)]
    sequences = [
        Sequence(slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1]), prefix)
        for i, (prefix, _) in enumerate(lengths)
    ]
    dtype = torch.bfloat16
    descales = {}
    if sizes.dtype == "fp8":
        dtype = fp8_format(sizes.fp8).dtype
        descales = {f"{name}_descale": torch.empty(1, device=device) for name in LARGEST}
    return MhaPrefillOperands(
        q=guarded((sizes.queries, sizes.heads, WIDTH), device, dtype),
        k=guarded((sizes.keys, sizes.heads, WIDTH), device, dtype),
        v=guarded((sizes.keys, sizes.heads, VALUE), device, dtype),
        cu_q=torch.tensor(cu_q, dtype=torch.int32, device=device),
        cu_k=torch.tensor(cu_k, dtype=torch.int32, device=device),
        sequences=sequences,
        sizes=sizes,
    ).replaced(**descales)


# So many tokens get random values. All further tokens get the same values with other signs, to save time.
DRAWN = 4096
# The largest magnitude that FP8 operands hold: at least eight standard deviations, so that none is clipped.
LARGEST = {"q": 64.0, "k": 12.0, "v": 8.0}
FAR = 4.0  # how far below a landmark an ordinary key is, along the landmarks' channel


def generate(sizes: MhaPrefillSizes, seeds: Seeds, device: str, boundary: str = "core") -> MhaPrefillOperands:
    """The operands, a pure function of the arguments.

    - Sharpness differs by head, from flat to peaked (in the odd heads the standard deviation of scores is 0.3
      to 8), so that a wrong scale, a block that was not rescaled and a lost block show.
    - In the even, flat heads every query attends to landmarks: the first key of its sequence, the last cached
      one, the first new one, and its own; and, where a mask lets them in, the key behind its own, the last
      key of the sequence before and the first of the next, and rows of zeros (see `_add_landmarks`).
    - Three channels are 2^17 times larger in k and 2^17 times smaller in q, three more 2^17 times larger in
      v: bf16 holds them, fp16 does not. FP8 with one scale for the tensor does not either, so that FP8
      operands have no such channels.
    - FP8 operands are quantised, with three different descales, of which none is a power of two.
    - There are tokens of NaN before and behind q, k and v.

    Adversarial operands differ from those of the same seeds in these points:
    - Three channels that are the same for all keys add 120 to all scores of every fourth head, and subtract
      120 from those of another fourth (see kernels/mla_decode/operands.py).
    - Keys at the edges of tiles of 64 and 128, and of halves, are landmarks too."""
    lengths_seed = seeds.stationary if seeds.lengths is None else seeds.lengths
    o = empty(sizes, sizes.lengths(lengths_seed), device)
    generator = torch.Generator(device).manual_seed(1_000_003 * seeds.stationary + seeds.live)

    def fill(operand: torch.Tensor) -> torch.Tensor:
        """Fills a bf16 operand with normal values, and returns it. For an FP8 operand, which is quantised
        later, it returns a bf16 tensor of the same shape."""
        filled = torch.empty_like(operand, dtype=torch.bfloat16) if o.is_fp8 else operand
        draw_normal(filled[:DRAWN], generator)
        for start in range(DRAWN, len(filled), DRAWN):
            part = filled[start : start + DRAWN]
            signs = torch.rand(filled.shape[1:], device=device, generator=generator).sub_(0.5).sign_()
            torch.mul(filled[: len(part)], signs.to(filled.dtype), out=part)
        return filled

    q, k, v = fill(o.q), fill(o.k), fill(o.v)
    # scale * q.k has the standard deviation 1 for normal q and k.
    sharpness = torch.empty(sizes.heads, device=device)
    sharpness[::2] = torch.logspace(-2, 0, len(sharpness[::2]), base=2.0, device=device)
    peaked = torch.logspace(-1.75, 3, len(sharpness[1::2]), base=2.0, device=device)
    sharpness[1::2] = peaked[torch.randperm(len(peaked), generator=generator, device=device)]
    q *= sharpness[:, None].to(q.dtype)
    _add_landmarks(q, k, o.sequences, seeds.adversarial)
    large_channels: list[int] = []
    if not o.is_fp8:
        large_channels = torch.randperm(NOPE, generator=generator, device=device)[:3].tolist()
        q[..., large_channels] *= 2.0**-17
        k[..., large_channels] *= 2.0**17
        v[..., torch.randperm(VALUE, generator=generator, device=device)[:3]] *= 2.0**17
    if seeds.adversarial:
        other_channels = [channel for channel in range(6) if channel not in large_channels]  # three or more
        shift_scores(q, k, other_channels[:3], LARGEST["k"])
    if o.is_fp8:
        for name, values in {"q": q, "k": k, "v": v}.items():
            descale = o.descales[f"{name}_descale"].fill_(LARGEST[name] / fp8_format(sizes.fp8).max)
            # In parts, because a quotient of the whole operand would take as much memory as that.
            for target, part in zip(getattr(o, name).split(DRAWN), values.split(DRAWN), strict=True):
                target.copy_(part / descale)
    return o


def _add_landmarks(q: torch.Tensor, k: torch.Tensor, sequences: list[Sequence], adversarial: bool) -> None:
    """Makes the even heads attend to landmarks, by their rope part, which is in the scores and not in the
    values. For a query that sees n keys a landmark scores L = ln(n / 16), but at least 0.5, more than an
    ordinary key. So it weighs as much as n / 16 of these.

    The first channel of that part marks the landmarks of all queries. They are 0 there, as is a row of zeros,
    and ordinary keys are so far below 0 that they score L less. The other 63 channels mark the landmarks of
    one query, its own key and the next one. A key holds the sum of two random codes, its own and that of the
    key before. A query holds the code of its own key, so that both keys score L more. The first new key and
    the last one leave out their own code, because the first channel marks them already. The first key of a
    sequence holds no code, because the key before it belongs to another sequence."""
    q_rope = q[:, ::2, NOPE:]
    k_rope = k[:, ::2, NOPE:]
    code = k_rope.clone()
    k_rope[1:] += code[:-1]
    k_rope[..., 0] = -FAR
    for sequence in sequences:
        first = sequence.keys.start
        last = sequence.keys.stop - 1
        first_new = first + sequence.prefix
        last_cached = max(first, first_new - 1)
        k_rope[[first_new, last]] = code[[first_new - 1, last - 1]]
        k_rope[first] = 0.0
        k_rope[[first, last_cached, first_new, last], :, 0] = 0.0
        if adversarial:
            k_rope[[first + key for key in edges(sequence.length, 64, 128)], :, 0] = 0.0
        keys_seen = torch.arange(sequence.prefix + 1, sequence.length + 1, device=q.device)
        lift = (keys_seen / 16).log().clamp(min=0.5)[:, None, None] / SCALE  # L as a product of q and k
        own_code = code[sequence.keys][sequence.prefix :]
        q_rope[sequence.queries] = (own_code * (lift / (ROPE - 1))).to(q.dtype)
        q_rope[sequence.queries, :, 0] = (lift[..., 0] / FAR).to(q.dtype)
