"""MHA prefill in plain torch: the obvious code; torch's fused attention, in a call for each sequence or in
one for all; and flex_attention, which torch compiles, for all sequences at once."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from kernels import platform as platforms
from kernels.lazy import torch
from kernels.mha_prefill.layouts import allocated_bytes, inputs_with, padded, padded_bytes
from kernels.mha_prefill.operands import VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes, Sequence, takes
from kernels.op import Call, Implementation, Prepared, Unsupported, implementation
from kernels.platform import Platform
from kernels.support import Support, need

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ROWS = 256  # query rows at once: the scores of a whole sequence would not fit into memory


def naive_bytes(sizes: MhaPrefillSizes) -> int:
    """The bytes of k and v of the longest sequence, twice, and of scores, q and results of ROWS rows, thrice.
    All are fp32."""
    per_key = 2 * (WIDTH + VALUE)
    of_rows = 3 * ROWS * (sizes.most_keys + 2 * WIDTH + 2 * VALUE)
    return 4 * sizes.heads * (sizes.most_keys * per_key + of_rows)


@implementation("torch.naive", requires="torch", rebinds=True, scratch=naive_bytes)
def naive(o: MhaPrefillOperands, out: torch.Tensor) -> Call:
    """Product, mask, softmax and product, all in fp32."""
    import torch

    def call() -> None:
        for sequence in o.sequences:
            k = o.k[sequence.keys].float().transpose(0, 1)
            v = o.v[sequence.keys].float().mul_(o.value_scale).transpose(0, 1)
            key = torch.arange(sequence.length, device=k.device)
            for first in range(0, sequence.new, ROWS):
                begin = sequence.queries.start + first
                rows = slice(begin, min(begin + ROWS, sequence.queries.stop))
                own_key = sequence.prefix + first + torch.arange(rows.stop - begin, device=k.device)[:, None]
                q = o.q[rows].float().transpose(0, 1)
                # Only one tensor of scores lives on into the next step: `naive_bytes` plans three in all.
                scores = (q @ k.transpose(1, 2) * o.score_scale).masked_fill(key > own_key, float("-inf"))
                out[rows] = (scores.softmax(-1) @ v).transpose(0, 1)

    return call


class Sdpa(Implementation):
    """scaled_dot_product_attention, with the kernel that torch chooses. FP8 operands are made bf16 first.
    That is exact for q and k, whose descales are in the softmax scale; v times its descale is rounded."""

    name = "torch.sdpa"
    requires = "torch"
    rebinds = True

    # The only kernel that a row allows, by its name in torch.nn.attention.SDPBackend; empty: any.
    backend: ClassVar[str] = ""
    # v is filled up to the width of q and k, because torch's flash kernels take one head size. The filling is
    # not timed: kv_b's product could write v so. The output's columns from the 128th on are dropped.
    padded: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "rocm")  # platforms that have the kernel

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.is_a(*self.kinds), super().available(platform))

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """v filled up, and FP8 operands made bf16 (v twice, without and with its descale)."""
        of_v = padded_bytes(sizes) if self.padded else 0
        if sizes.dtype != "fp8":
            return of_v
        return of_v + 2 * sizes.heads * (sizes.queries * WIDTH + sizes.keys * (WIDTH + 2 * VALUE))

    def scratch(self, sizes: MhaPrefillSizes) -> int:
        """The mask of the longest sequence, as bools and as bf16, and the call's own output for it."""
        masks = max(new * (prefix + new) * (1 + 2) for prefix, new in sizes.lengths())
        return masks + sizes.most_new * sizes.heads * WIDTH * 2

    def prepare(self, o: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        if not o.is_fp8:
            return self.in_bf16(o, out)
        in_bf16 = {name: tensor.bfloat16() for name, tensor in o.live_tensors().items()}
        no_descales = dict.fromkeys(o.descales)  # those of q and k go into the scale, that of v into v
        inner = self.in_bf16(o.replaced(**in_bf16, **no_descales, scale=o.score_scale), out)
        inputs = inner.inputs()

        def call() -> None:
            inputs["q"].copy_(o.q)
            inputs["k"].copy_(o.k)
            torch.mul(o.v.bfloat16(), o.v_descale, out=inputs["v"])
            inner.call()

        return Prepared(o, out, call)

    def in_bf16(self, o: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        import torch.nn.attention

        v = padded(o.v) if self.padded else o.v
        masks = [causal(s, out.device) for s in o.sequences]
        kernel_choice: Callable[[], Any] = contextlib.nullcontext
        if self.backend:
            self.require_kernel(o, v, masks)
            kernel = getattr(torch.nn.attention.SDPBackend, f"{self.backend.upper()}_ATTENTION")
            kernel_choice = functools.partial(torch.nn.attention.sdpa_kernel, kernel)

        def call() -> None:
            with kernel_choice():
                for sequence, mask in zip(o.sequences, masks, strict=True):
                    attended = torch.nn.functional.scaled_dot_product_attention(
                        *batched(o, v, sequence), attn_mask=mask, scale=o.scale
                    )
                    out[sequence.queries] = attended[0, ..., :VALUE].transpose(0, 1)

        return Prepared(o, out, call, inputs=inputs_with(o, v))

    def require_kernel(self, o: MhaPrefillOperands, v: torch.Tensor, masks: list[torch.Tensor]) -> None:
        """Raises Unsupported where torch has no such kernel for these operands; the call would fail."""
        can_use = getattr(torch.backends.cuda, f"can_use_{self.backend}_attention")
        for sequence, mask in zip(o.sequences, masks, strict=True):
            dense_mask = mask if type(mask) is torch.Tensor else None  # not torch's causal bias
            dropout, is_causal, enable_gqa = 0.0, sequence.prefix == 0, False
            params = (*batched(o, v, sequence), dense_mask, dropout, is_causal, enable_gqa)
            if not can_use(torch.backends.cuda.SDPAParams(*params), False):  # False: without warnings
                raise Unsupported(
                    f"this torch's {self.backend} kernel does not take {sequence.new} queries over "
                    f"{sequence.length} keys with v {v.shape[-1]} wide on this device"
                )


class Flash(Sdpa):
    """On ROCm this is AOTriton's flash attention, which torch's build carries (CK's only where
    torch.backends.cuda.preferred_rocm_fa_library was set to CK). AOTriton has no rows of its own."""

    name = "torch.sdpa_flash"
    requires = "torch's build for CUDA or ROCm (there AOTriton)"
    kinds = ("cuda", "rocm")
    backend = "flash"


class Efficient(Flash):
    """On ROCm this is AOTriton's too, by torch's other entry, which takes v with a width of its own."""

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
        nothing_cached = sizes.keys == sizes.queries
        return need(nothing_cached, "torch gives cuDNN no causal mask over cached tokens; needs prefix=0")


def batched(
    o: MhaPrefillOperands, v: torch.Tensor, sequence: Sequence
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a sequence, [1, heads, tokens, width]."""
    q, k, v = o.q[sequence.queries], o.k[sequence.keys], v[sequence.keys]
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def causal(sequence: Sequence, device: torch.device) -> torch.Tensor:
    """The mask [new, length]: torch's own bias, which its kernels recognise as causal. On ROCm they align it
    to the first key, not to the last: there the mask is a dense bool tensor if tokens are cached."""
    from torch.nn.attention.bias import causal_lower_right

    if sequence.prefix and platforms.of(device).kind == "rocm":
        mask = torch.ones(sequence.new, sequence.length, dtype=torch.bool, device=device)
        return mask.tril_(sequence.prefix)
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
    parameters = inspect.signature(varlen_attn).parameters
    attend = cast("Callable[..., torch.Tensor]", varlen_attn)  # its signature differs by version
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in parameters:
        options = {"window_size": (-1, 0)}  # all keys before a query's own, none behind it
    if "scale" in parameters:  # without it the scale is (q's width) ** -0.5, which is the same
        options["scale"] = o.scale
    v = padded(o.v)

    def call() -> None:
        most = (o.sizes.most_new, o.sizes.most_keys)
        out.copy_(attend(o.q, o.k, v, o.cu_q, o.cu_k, *most, **options)[..., :VALUE])

    return Prepared(o, out, call, inputs=inputs_with(o, v))


# By the compiler

BLOCK = 128  # rows and keys of a block of the mask
MOST_SHAPES = 256  # that one process may compile. Beyond its own limit, 8, torch would run shapes unfused


@implementation(
    "torch.compile",
    requires="torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)",
    available=lambda platform: platform.compiler(),
    per_size=True,
    fits=takes("bf16"),
    # First and own keys of rows, int64; the mask's four tables, two of them for the backward pass, which are
    # counted in int64, because argsort makes them so before they are cast.
    workspace=lambda sizes: (
        sizes.queries * 16 + (sizes.queries // BLOCK + 1) * (sizes.keys // BLOCK + 1) * 4 * 8
    ),
    scratch=lambda sizes: sizes.queries * sizes.heads * VALUE * 2,  # the call's own output
)
def compiled(o: MhaPrefillOperands, out: torch.Tensor) -> Call:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = MOST_SHAPES
    mask = block_mask(o)
    attend = torch.compile(flex_attention, dynamic=False)

    def call() -> None:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (o.q, o.k, o.v))
        with torch.no_grad():
            attended = attend(q, k, v, block_mask=mask, scale=o.scale)
        out.copy_(attended[0].transpose(0, 1))

    return call


def block_mask(o: MhaPrefillOperands) -> BlockMask:
    """Which blocks of keys each block of query rows sees, wholly or in part. One block of rows is looked at
    after the other, because a mask of all rows and keys would take gigabytes."""
    from torch.nn.attention.flex_attention import BlockMask

    # The first key that each query row sees, and the last, which is its own: int64 [T] each.
    first_key = torch.cat([torch.full((s.new,), s.keys.start) for s in o.sequences]).to(o.q.device)
    own_key = torch.cat([torch.arange(s.keys.stop - s.new, s.keys.stop) for s in o.sequences]).to(o.q.device)

    def sees(batch, head, row, key):
        return (key >= first_key[row]) & (key <= own_key[row])

    keys = torch.arange(-(-len(o.k) // BLOCK) * BLOCK, device=o.q.device)
    seen_in_part, seen_wholly = [], []
    for rows in torch.arange(len(o.q), device=o.q.device).split(BLOCK):
        seen = sees(0, 0, rows[:, None], keys).unflatten(1, (-1, BLOCK))
        seen_in_part.append(seen.any(0).any(-1))
        seen_wholly.append(seen.all(0).all(-1))
    full = torch.stack(seen_wholly)
    return BlockMask.from_kv_blocks(
        *_counts_and_order(torch.stack(seen_in_part) & ~full),
        *_counts_and_order(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(o.q), len(o.k)),
    )


def _counts_and_order(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of rows sees, int32 [1, 1, rows], and the numbers of all blocks of
    keys with those first, int32 [1, 1, rows, keys]. seen: bool [rows, keys], both in blocks"""
    order = torch.argsort((~seen).int(), dim=-1, stable=True)
    return seen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
