"""MHA prefill in plain torch: the obvious code; torch's fused attention, in a call for each sequence or in
one for all; and flex_attention, which torch's compiler makes for all sequences at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from kernels import platform as platforms
from kernels.lazy import torch
from kernels.mha_prefill.layouts import allocated_bytes, padded, padded_bytes, reading
from kernels.mha_prefill.operands import VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes, Sequence, takes
from kernels.op import Call, Implementation, Prepared, Unsupported, implementation
from kernels.platform import Platform
from kernels.support import Support, need

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ROWS = 256  # query rows at once: all heads' scores of a whole sequence would not fit


def naive_bytes(sizes: MhaPrefillSizes) -> int:
    _, longest = sizes.longest
    of_rows = 3 * ROWS * (longest + 2 * WIDTH + 2 * VALUE)
    return 4 * sizes.heads * (longest * (WIDTH + VALUE) * 2 + of_rows)


@implementation("torch.naive", requires="torch", rebinds=True, scratch=naive_bytes)
def naive(o: MhaPrefillOperands, out: torch.Tensor) -> Call:
    import torch

    def call() -> None:
        for sequence in o.sequences:
            k = o.k[sequence.keys].float().transpose(0, 1)
            v = o.v[sequence.keys].float().mul_(o.value_scale).transpose(0, 1)
            key = torch.arange(sequence.length, device=k.device)
            for first in range(0, sequence.new, ROWS):
                begin = sequence.queries.start + first
                rows = slice(begin, min(begin + ROWS, sequence.queries.stop))
                position = sequence.prefix + first + key[: rows.stop - rows.start, None]
                q = o.q[rows].float().transpose(0, 1)
                out[rows] = attend(q, k, v, key > position, o.score_scale).transpose(0, 1)

    return call


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    """[heads, rows, 128] of q [heads, rows, 192], k [heads, keys, 192], v [heads, keys, 128], all fp32, with
    hidden [rows, keys] true where the mask hides a key: product, mask, softmax, product."""
    scores = q @ k.transpose(1, 2) * scale
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


class Sdpa(Implementation):
    """scaled_dot_product_attention, by the kernel that torch chooses. FP8 operands are made bf16 first: that
    is exact for q and k, because their descales are in the softmax scale, while v is multiplied by its own
    and rounded."""

    name = "torch.sdpa"
    requires = "torch"
    rebinds = True

    # The kernel that a row is held to, by its name in torch.nn.attention.SDPBackend; empty: any.
    backend: ClassVar[str] = ""
    # v is as wide as q and k: torch's flash kernels take one head size. kv_b's product would write it so; the
    # output's columns from the 128th on are dropped.
    padded: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "rocm")  # platforms that have the kernel

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.is_a(*self.kinds), super().available(platform))

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """v in its layout and FP8 operands made bf16."""
        widened = sizes.queries * WIDTH + sizes.keys * (WIDTH + 2 * VALUE) if sizes.dtype == "fp8" else 0
        return widened * sizes.heads * 2 + (padded_bytes(sizes) if self.padded else 0)

    def scratch(self, sizes: MhaPrefillSizes) -> int:
        """The mask of the longest sequence, written out, and the call's own output for it."""
        longest = max(new * (prefix + new) * (1 + 2) for prefix, new in sizes.lengths())
        return longest + sizes.longest[0] * sizes.heads * WIDTH * 2

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        """FP8 operands are made bf16 within the call, before the call that takes those."""
        o = operands
        if not o.is_fp8:
            return self.in_bf16(o, out)
        in_bf16 = {name: tensor.bfloat16() for name, tensor in o.live_tensors().items()}
        no_descales = dict.fromkeys(o.descales)
        inner = self.in_bf16(o.replaced(**in_bf16, **no_descales, scale=o.score_scale), out)
        read = inner.inputs()

        def call() -> None:
            read["q"].copy_(o.q)
            read["k"].copy_(o.k)
            torch.mul(o.v.bfloat16(), o.v_descale, out=read["v"])
            inner.call()

        return Prepared(o, out, call)

    def in_bf16(self, o: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        import torch.nn.attention

        v = padded(o.v) if self.padded else o.v
        masks = [causal(s, out.device) for s in o.sequences]
        held: Callable[[], Any] = contextlib.nullcontext
        if self.backend:
            self.ask(o, v, masks)
            kernel = getattr(torch.nn.attention.SDPBackend, f"{self.backend.upper()}_ATTENTION")
            held = functools.partial(torch.nn.attention.sdpa_kernel, kernel)

        def call() -> None:
            with held():
                for sequence, mask in zip(o.sequences, masks, strict=True):
                    attended = torch.nn.functional.scaled_dot_product_attention(
                        *batched(o, v, sequence), attn_mask=mask, scale=o.scale
                    )
                    out[sequence.queries] = attended[0, ..., :VALUE].transpose(0, 1)

        return Prepared(o, out, call, inputs=reading(o, v))

    def ask(self, o: MhaPrefillOperands, v: torch.Tensor, masks: list[torch.Tensor]) -> None:
        """Raises Unsupported where torch lacks the kernel for these operands: in the call that would be an
        error."""
        can_use = getattr(torch.backends.cuda, f"can_use_{self.backend}_attention")
        for sequence, mask in zip(o.sequences, masks, strict=True):
            written_out = mask if type(mask) is torch.Tensor else None
            params = (*batched(o, v, sequence), written_out, 0.0, sequence.prefix == 0, False)
            if not can_use(torch.backends.cuda.SDPAParams(*params), False):
                raise Unsupported(
                    f"this torch's {self.backend} kernel does not take {sequence.new} queries over "
                    f"{sequence.length} keys with v {v.shape[-1]} wide on this device"
                )


class Flash(Sdpa):
    """On ROCm this is AOTriton's flash attention, which torch's build carries (CK only where
    torch.backends.cuda.preferred_rocm_fa_library was set to that): its row there, and it has no other."""

    name = "torch.sdpa_flash"
    requires = "torch's build for CUDA or ROCm (there AOTriton)"
    kinds = ("cuda", "rocm")
    backend = "flash"


class Efficient(Flash):
    """On ROCm AOTriton too, by torch's other entry, which takes v as narrow as it is."""

    name = "torch.sdpa_efficient"
    backend = "efficient"
    padded = False


class Cudnn(Sdpa):
    name = "torch.sdpa_cudnn"
    requires = "torch's build for CUDA, with cuDNN 9 or later"
    kinds = ("cuda",)
    backend = "cudnn"
    padded = False

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        fresh = sizes.keys == sizes.queries
        return need(fresh, "torch gives cuDNN no causal mask over cached tokens; needs prefix=0")


def batched(
    o: MhaPrefillOperands, v: torch.Tensor, sequence: Sequence
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a sequence, [1, heads, tokens, width]."""
    q, k, v = o.q[sequence.queries], o.k[sequence.keys], v[sequence.keys]
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def causal(sequence: Sequence, device: torch.device) -> torch.Tensor:
    """The mask [new, length]: torch's own bias, which its kernels know as causal. On ROCm they align that to
    the first key and not to the last: there it is written out if tokens are cached."""
    from torch.nn.attention.bias import causal_lower_right

    if sequence.prefix and platforms.of(device).kind == "rocm":
        every = torch.ones(sequence.new, sequence.length, dtype=torch.bool, device=device)
        return every.tril_(sequence.prefix)
    return causal_lower_right(sequence.new, sequence.length)


@implementation(
    "torch.varlen",
    requires="torch's build for CUDA, 2.10 or later",
    available=lambda platform: platform.is_a("cuda"),
    fits=takes("bf16"),
    workspace=padded_bytes,
    scratch=lambda sizes: allocated_bytes(sizes, WIDTH),
)
def varlen(o: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
    """varlen_attn, FlashAttention over all sequences at once; it aligns the causal mask to the last key."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise Unsupported("this torch has no torch.nn.attention.varlen (2.10 or later has)") from None
    takes = inspect.signature(varlen_attn).parameters
    attend = cast("Callable[..., torch.Tensor]", varlen_attn)  # its signature differs by version
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    if "scale" in takes:  # those without take q's width ** -0.5, as here
        options["scale"] = o.scale
    v = padded(o.v)

    def call() -> None:
        out.copy_(attend(o.q, o.k, v, o.cu_q, o.cu_k, *o.sizes.longest, **options)[..., :VALUE])

    return Prepared(o, out, call, inputs=reading(o, v))


# By the compiler

BLOCK = 128  # rows of the mask's blocks, and keys
SHAPES = 256  # one process may compile for so many; beyond torch's default of 8 they would run unfused


@implementation(
    "torch.compile",
    requires="torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)",
    available=lambda platform: platform.compiler(),
    per_size=True,
    fits=takes("bf16"),
    # The mask's tables, which backward products would read too.
    workspace=lambda sizes: (
        sizes.queries * 16 + (sizes.queries // BLOCK + 1) * (sizes.keys // BLOCK + 1) * 4 * 8
    ),
    scratch=lambda sizes: sizes.queries * sizes.heads * 128 * 2,  # the call's own output
)
def compiled(o: MhaPrefillOperands, out: torch.Tensor) -> Call:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = SHAPES
    mask = block_mask(o)
    attend = torch.compile(flex_attention, dynamic=False)

    def call() -> None:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (o.q, o.k, o.v))
        with torch.no_grad():
            attended = attend(q, k, v, block_mask=mask, scale=o.scale)
        out.copy_(attended[0].transpose(0, 1))

    return call


def block_mask(o: MhaPrefillOperands) -> BlockMask:
    """Which blocks of keys a block of query rows sees, wholly or in part. It is found for one block of rows
    after the other, because a mask of all rows and keys would take gigabytes."""
    from torch.nn.attention.flex_attention import BlockMask

    # The first key that each query row sees, and the last, which is its own: int64 [T] each.
    first_key = torch.cat([torch.full((s.new,), s.keys.start) for s in o.sequences]).to(o.q.device)
    own_key = torch.cat([torch.arange(s.keys.stop - s.new, s.keys.stop) for s in o.sequences]).to(o.q.device)

    def sees(batch, head, row, key):
        return (key >= first_key[row]) & (key <= own_key[row])

    keys = torch.arange(-(-len(o.k) // BLOCK) * BLOCK, device=o.q.device)
    by_any, by_all = [], []
    for rows in torch.arange(len(o.q), device=o.q.device).split(BLOCK):
        seen = sees(0, 0, rows[:, None], keys).unflatten(1, (-1, BLOCK))
        by_any.append(seen.any(0).any(-1))
        by_all.append(seen.all(0).all(-1))
    full = torch.stack(by_all)
    return BlockMask.from_kv_blocks(
        *_listed(torch.stack(by_any) & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(o.q), len(o.k)),
    )


def _listed(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of rows sees, and which, those first: int32 [1, 1, rows] and
    [1, 1, rows, keys] of a bool [rows, keys]."""
    order = torch.argsort((~seen).int(), dim=-1, stable=True)
    return seen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
