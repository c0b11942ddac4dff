"""Sizes and operands of an MLA decode: queries and a paged cache on which the usual mistakes show."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kernels.attention import BYTES, SCALE, check_sizes, edges, shift_scores
from kernels.formats import fp8_format
from kernels.lazy import torch
from kernels.operands import Operands, Seeds, draw_normal
from kernels.support import Support, need
from shapes.case import MOST_QUERIES
from shapes.lengths import parse_span, spread

LATENT = 512
ROPE = 64
WIDTH = LATENT + ROPE


@dataclass(frozen=True)
class MlaDecodeSizes:
    batch: int  # sequences
    ctx: str  # tokens of each sequence, the query tokens included: one length or low..high, spread evenly
    heads: int = 16  # query heads of the rank
    page: int = 64  # tokens of a page of the cache
    kv: str = "bf16"  # the cache's dtype: bf16, or fp8 with one scale
    fp8: str = "e4m3fn"  # the format of an FP8 cache; a case with a bf16 cache does not name it
    # The server's context length, for which engines record the call into a graph (vLLM's --max-model-len,
    # SGLang's --context-length): rows that follow an engine split sequences by it. Without graphs vLLM splits
    # by the longest sequence: set model_len to that. The default is DeepSeek-V3's max_position_embeddings.
    model_len: int = 163_840
    q: int = 1  # query tokens of each sequence, its last ones: 1 + draft tokens where a step verifies drafts

    def __post_init__(self) -> None:
        check_sizes("mla_decode", self, ("batch", "heads", "page", "q"), "kv")
        shortest, longest = parse_span(self.ctx)
        if self.q > MOST_QUERIES:
            raise ValueError(f"size q={self.q} of mla_decode must be at most {MOST_QUERIES}")
        if shortest < self.q:
            raise ValueError(
                f"size ctx={self.ctx} of mla_decode counts the q={self.q} query tokens of a sequence: "
                f"it must be at least {self.q}"
            )
        if longest > self.model_len:
            raise ValueError(
                f"size ctx={self.ctx} of mla_decode exceeds the server's context length of "
                f"{self.model_len} tokens; give model_len={longest} or more"
            )

    def lengths(self, seed: int = 0) -> list[int]:
        return spread(parse_span(self.ctx), self.batch, seed)

    @property
    def tokens(self) -> int:
        return sum(self.lengths())

    @property
    def rows(self) -> int:
        """Rows of the queries: one for each head of each query token of each sequence."""
        return self.batch * self.q * self.heads

    @property
    def pairs(self) -> int:
        """Pairs of a query token and a key that it sees."""
        return self.q * self.tokens - self.batch * self.q * (self.q - 1) // 2

    @property
    def used_pages(self) -> int:
        return sum(math.ceil(length / self.page) for length in self.lengths())

    @property
    def cache_pages(self) -> int:
        return self.used_pages + SPARE_PAGES


def takes(
    kv: str = "",
    most_heads: int = 0,
    page_multiple_of: int = 1,
    page_divides: int = 0,
    most_q: int = 1,
    why_most_q: str = "",
) -> Callable[[MlaDecodeSizes], Support]:
    """The function that a row declares as `fits`. By default the row takes all sizes with one query token.

    kv: the only dtype of the cache that the row takes; empty: either
    page_multiple_of, page_divides: what the tokens of a page must be a multiple of, and what they must divide
    most_q: the most query tokens; why_most_q: the reason, which a refusal gives"""
    dtype_taken = "a bf16 cache" if kv == "bf16" else "an FP8 cache"
    queries_taken = "1 query token" if most_q == 1 else f"{most_q} query tokens"
    why = f": {why_most_q}" if why_most_q else ""

    def fits(sizes: MlaDecodeSizes) -> Support:
        heads_fit = not most_heads or sizes.heads <= most_heads
        is_multiple = sizes.page % page_multiple_of == 0
        divides = not page_divides or page_divides % sizes.page == 0
        return Support.all_of(
            need(not kv or sizes.kv == kv, f"takes {dtype_taken}, not {sizes.kv}"),
            need(sizes.q <= most_q, f"takes {queries_taken}, not {sizes.q}{why}"),
            need(heads_fit, f"takes up to {most_heads} heads, not {sizes.heads}"),
            need(is_multiple, f"needs a page that is a multiple of {page_multiple_of}"),
            need(divides, f"needs a page that divides {page_divides}"),
        )

    return fits


@dataclass
class MlaDecodeOperands(Operands):
    q: torch.Tensor  # bf16 [batch, q, heads, 576]; token t of q sees all keys but the last q - 1 - t
    kv: torch.Tensor  # bf16, e4m3fn or e4m3fnuz [pages, page, 576]; slots without a token are NaN
    page_table: torch.Tensor  # int32 [batch, max_pages + 1], padded with the number of a page of NaN
    lengths: torch.Tensor  # int32 [batch] on the device
    host_lengths: list[int]  # the same on the host
    kv_scale: float  # a stored value is to be multiplied by it; 1.0 for bf16
    sizes: MlaDecodeSizes
    scale: float = SCALE
    boundary: str = "core"

    live: ClassVar = ("q", "kv")
    streamed: ClassVar = ("kv",)

    @property
    def without_effect(self) -> frozenset[str]:
        """q, where each sequence has one token: the weight of that is 1, whatever its score."""
        return frozenset({"q"}) if max(self.host_lengths) == 1 else frozenset()

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def packed(self) -> torch.Tensor:
        """The query tokens of all sequences one after the other, a view [batch * q, heads, 576]."""
        return self.q.flatten(0, 1)

    def unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """A packed output [batch * q, heads, 512] as [batch, q, heads, 512]."""
        return packed.unflatten(0, self.q.shape[:2])

    def hidden(self, length: int) -> torch.Tensor | None:
        """Which keys of a sequence of this length the causal mask hides from each query row, where row =
        token * heads + head: bool [q * heads, length]. None with one query token, which sees all keys."""
        queries = self.q.shape[1]
        if queries == 1:
            return None
        token = torch.arange(queries, device=self.q.device).repeat_interleave(self.heads)
        return torch.arange(length, device=self.q.device) > length - queries + token[:, None]

    def scale_tensor(self, value: float) -> torch.Tensor:
        """A scale as libraries want it, fp32 [1]."""
        return torch.full((1,), value, dtype=torch.float32, device=self.q.device)

    @property
    def page(self) -> int:
        return self.kv.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.kv.element_size() == 1

    def far(self) -> MlaDecodeOperands:
        """The cache in a larger tensor, so far behind its start that offsets in values exceed 32 bits."""
        pages, page, width = self.kv.shape
        first = math.ceil((1 << 32) / (page * width))
        kv = self.kv.new_empty(first + pages, page, width)
        # An offset that is cut to 32 bits lies in these pages. Those between are never read.
        kv[: pages + 1].copy_(torch.tensor(torch.nan, device=kv.device))
        kv[first:] = self.kv
        return self.replaced(kv=kv, page_table=self.page_table + first)

    def token_slots(self, sequence: int) -> torch.Tensor:
        """Rows of kv.view(-1, 576) that hold the sequence's tokens, int64 [length]."""
        length = self.host_lengths[sequence]
        page = self.page
        pages = self.page_table[sequence, : math.ceil(length / page)].long()
        return (pages[:, None] * page + torch.arange(page, device=pages.device)).flatten()[:length]

    def unused_slots(self) -> torch.Tensor:
        """Rows of kv.view(-1, 576) without a token, int64 [rows]."""
        unused = torch.ones(len(self.kv) * self.page, dtype=torch.bool, device=self.kv.device)
        for sequence in range(len(self.host_lengths)):
            unused[self.token_slots(sequence)] = False
        return unused.nonzero().flatten()

    def split_pages(self, page: int) -> torch.Tensor:
        """The page table, int32 [batch, (max_pages + 1) * factor], of the cache seen as `factor` times as
        many smaller pages, kv.view(-1, page, 576). page: tokens of these, which divide the cache's own"""
        factor = self.page // page
        part = torch.arange(factor, dtype=torch.int32, device=self.page_table.device)
        return (self.page_table[:, :, None] * factor + part).flatten(1).contiguous()


SPARE_PAGES = 3  # pages of the cache without tokens: the one of NaN that pads the table, and two others
# Scales of an FP8 cache. With them the largest number of either format means about 15. Values have a standard
# deviation of 1, and in the rope part means of up to about 12, because `_add_landmarks` shifts them.
KV_SCALE = {"e4m3fn": 2.0**-5, "e4m3fnuz": 2.0**-4}
# The channel with which adversarial operands shift scores. Both FP8 formats hold its values in kv and q.
SHIFTING_CHANNEL = WIDTH - 1
# A number of pages of which a ninth have numbers that a signed integer of 16 bits cannot hold.
MANY_PAGES = (1 << 15) + (1 << 12)
MOST_BYTES_OF_MANY_PAGES = 200 << 20  # a larger cache is not made only to have so many pages


def empty(sizes: MlaDecodeSizes, lengths: list[int], device: str, least_pages: int = 0) -> MlaDecodeOperands:
    """The operands for sequences of these lengths, without values of q, the cache and the page table."""
    page_counts = [math.ceil(length / sizes.page) for length in lengths]
    pages = max(sum(page_counts) + SPARE_PAGES, least_pages)
    dtype = torch.bfloat16
    kv_scale = 1.0
    if sizes.kv == "fp8":
        dtype = fp8_format(sizes.fp8).dtype
        kv_scale = KV_SCALE[sizes.fp8]
    return MlaDecodeOperands(
        q=torch.empty(sizes.batch, sizes.q, sizes.heads, WIDTH, dtype=torch.bfloat16, device=device),
        kv=torch.empty(pages, sizes.page, WIDTH, dtype=dtype, device=device),
        page_table=torch.empty(sizes.batch, max(page_counts) + 1, dtype=torch.int32, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        host_lengths=lengths,
        kv_scale=kv_scale,
        sizes=sizes,
    )


def generate(sizes: MlaDecodeSizes, seeds: Seeds, device: str, boundary: str = "core") -> MlaDecodeOperands:
    """The operands, a pure function of the arguments.

    - Sharpness differs by head, from flat to peaked (the standard deviation of scores is 0.3 to 8), so that a
      wrong scale, a combine without rescaling and a lost page show.
    - The first token of each sequence and its query tokens are landmarks. In the even heads a landmark weighs
      about a sixteenth of all ordinary tokens together, and so does a row of zeros, if a mask lets one in. So
      a length or a causal edge that is off by one shows at any context. The odd heads treat landmarks like
      other tokens, so that a lost page shows there.
    - Three latent channels are 2^17 times larger in kv and 2^17 times smaller in q: bf16 holds them, fp16
      does not (in a bf16 cache only: the largest number of e4m3 is 448).
    - Pages are shuffled; each slot without a token is NaN, and so is the page that pads the table.

    Adversarial operands differ from those of the same seeds in these points:
    - A rope channel that is the same for all tokens adds 120 to all scores of every fourth head, and
      subtracts 120 from those of another fourth: a softmax that subtracts no maximum overflows, one whose
      maximum starts at 0 underflows, and a masked token of score 0 gets all the weight.
    - Tokens at the edges of the second page, the last page and the second half are landmarks too.
    - No head is peaked on an FP8 cache: a row's largest weight, which is 1 before the division by the sum,
      has no error, and where it is most of the sum nothing shows how the others are rounded.
    - Small pages are so many that their numbers exceed 16 bits."""
    lengths_seed = seeds.stationary if seeds.lengths is None else seeds.lengths
    lengths = sizes.lengths(lengths_seed)
    bytes_of_many_pages = MANY_PAGES * sizes.page * WIDTH * BYTES[sizes.kv]
    has_many_pages = seeds.adversarial and bytes_of_many_pages <= MOST_BYTES_OF_MANY_PAGES
    operands = empty(sizes, lengths, device, MANY_PAGES if has_many_pages else 0)
    operands.page_table.copy_(_page_table(operands, random.Random(seeds.stationary)))

    generator = torch.Generator(device).manual_seed(1_000_003 * seeds.stationary + seeds.live)
    # Both are rounded to the dtypes of the case at the end.
    q = torch.empty_like(operands.q, dtype=torch.float32)
    kv = torch.empty_like(operands.kv, dtype=torch.bfloat16) if operands.is_fp8 else operands.kv
    draw_normal(q, generator)
    draw_normal(kv, generator)
    # scale * q.kv has the standard deviation sqrt(576/192) = 1.73 for normal q and kv.
    sharpest_log2 = 0.0 if seeds.adversarial and sizes.kv == "fp8" else 2.2
    sharpness = torch.logspace(-2.5, sharpest_log2, sizes.heads, base=2.0, device=device)
    q *= sharpness[torch.randperm(sizes.heads, generator=generator, device=device)][:, None]
    direction = torch.empty(sizes.batch, ROPE, device=device)
    draw_normal(direction, generator)
    if seeds.adversarial:
        direction[:, SHIFTING_CHANNEL - LATENT] = 0.0  # because `shift_scores` overwrites that channel
    _add_landmarks(operands, q, kv, direction, seeds.adversarial)
    if seeds.adversarial:
        shift_scores(q.flatten(0, 1), kv, [SHIFTING_CHANNEL], of_keys=8.0)
    if sizes.kv == "bf16":
        channels = torch.randperm(LATENT, generator=generator, device=device)[:3]
        q[..., channels] *= 2.0**-17
        kv[..., channels] *= 2.0**17
    operands.q.copy_(q)
    kv.view(-1, WIDTH)[operands.unused_slots()] = float("nan")
    if operands.is_fp8:
        largest = fp8_format(sizes.fp8).max
        operands.kv.copy_((kv.float() / operands.kv_scale).clamp(-largest, largest))
    return operands


def _page_table(operands: MlaDecodeOperands, generator: random.Random) -> torch.Tensor:
    """The pages of the cache, dealt to the sequences at random, int64 [batch, max_pages + 1]. The first page
    of the shuffled ones is not dealt: it pads the table."""
    pages = list(range(len(operands.kv)))
    generator.shuffle(pages)
    padding, dealt = pages[0], 1
    width = operands.page_table.shape[1]
    table = []
    for length in operands.host_lengths:
        count = math.ceil(length / operands.page)
        table.append(pages[dealt : dealt + count] + [padding] * (width - count))
        dealt += count
    return torch.tensor(table)


def _add_landmarks(
    operands: MlaDecodeOperands, q: torch.Tensor, kv: torch.Tensor, direction: torch.Tensor, adversarial: bool
) -> None:
    """Makes every other head attend to the landmarks of each sequence.

    It uses a direction of the rope part, which is in the scores and not in the values. Along it q becomes 4
    in the even heads and 0 in the odd ones, a landmark becomes 0, and any other row so far below 0 that it
    scores ln(length / 16) less than a landmark. A row of zeros scores like a landmark.

    q, kv: the values so far, in the layouts of `operands`; direction: [batch, 64], of any norm"""
    unit = direction / direction.norm(dim=-1, keepdim=True)
    q_rope = q[..., LATENT:]
    unit_of_rows = unit[:, None, None, :]
    q_rope -= (q_rope @ unit[:, None, :, None]) * unit_of_rows
    q_rope[:, :, ::2] += 4.0 * unit_of_rows
    flat = kv.view(-1, WIDTH)
    for sequence, length in enumerate(operands.host_lengths):
        u = unit[sequence]
        slots = operands.token_slots(sequence)
        distance = max(0.0, math.log(length / 16)) / operands.scale / 4.0
        below_0 = torch.full((length,), distance, device=u.device)
        landmarks = [0, *range(length - operands.sizes.q, length)]
        if adversarial:
            landmarks += edges(length, operands.page)
        below_0[landmarks] = 0.0
        rope = flat[slots, LATENT:].float()
        flat[slots, LATENT:] = (rope - (rope @ u + below_0)[:, None] * u).to(flat.dtype)
