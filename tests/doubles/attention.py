"""Attention of libraries in numbers, from the layouts that their sources document: one function for each
layout that is easily got wrong. Each reads its arguments as the library does, writes or returns what the
library does, and knows nothing of the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.stand_ins import Answer, Arguments

LATENT = 512


def attended(
    q: Any, k: Any, v: Any, scale: Any, causal: bool = False, of_weights: float = 1.0
) -> torch.Tensor:
    """fp32 [queries, heads, width of v] of q [queries, heads, d], k [keys, heads or 1, d] and v; scale: one
    for all heads, or fp32 [heads]; a causal mask is aligned to the last key. Weights of FP8 operands are
    rounded to their format, as kernels do; times `of_weights` before, and so is the output."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().expand(-1, q.shape[1], -1))
    scores *= torch.as_tensor(scale).view(-1, 1, 1)
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
        scores.masked_fill_(hidden, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1)
    if q.element_size() == 1:
        weights = (weights * of_weights).to(q.dtype).float()
    summed = torch.einsum("hqk,khd->hqd", weights, v.float().expand(-1, q.shape[1], -1))
    return (summed / total[..., None]).transpose(0, 1)


def number(scale: torch.Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)


def block_table(a: Arguments) -> tuple[torch.Tensor, None]:
    """flash_mla_interface.py and csrc/api/dense_decode.h of FlashMLA 9241ae3: q [batch, queries, heads, 576],
    k_cache [pages of 64, 64, 1, 576], block_table [batch, pages], of which the first that hold cache_seqlens
    tokens are read; rows behind those are zeros. The scale by default is 576**-0.5. Without a descale in the
    older builds; with descale_q and descale_k in sgl-flash-mla 1.0.0."""
    q, cache, table = a["q"], a["k_cache"], a["block_table"]
    assert table.dtype == a["cache_seqlens"].dtype == torch.int32, "FlashMLA takes int32"
    assert cache.shape[1:] == (64, 1, 576) and a["head_dim_v"] == LATENT and q.dtype == cache.dtype
    of_q, of_k = number(a.get("descale_q")), number(a.get("descale_k"))
    out = torch.empty(*q.shape[:3], LATENT, dtype=torch.bfloat16)
    for i, length in enumerate(a["cache_seqlens"].tolist()):
        keys = cache[table[i, : -(-length // 64)].long()].flatten(0, 1)[:length]
        scale = a.get("softmax_scale", 576**-0.5) * of_q * of_k
        out[i] = attended(q[i], keys, keys[..., :LATENT], scale, a.get("causal", False)) * of_k
    return out, None


def page_list(a: Arguments) -> None:
    """aiter/mla.py and csrc/py_itfs_cu/asm_mla.cu of AITER e404860: q [tokens, heads, 576], kv_buffer [pages,
    page, 1, 576]; qo_indptr and kv_indptr [batch + 1] tell rows of q and entries of kv_indices, the pages of
    all sequences; the last of each holds kv_last_page_lens tokens. fp32 q_scale and kv_scale [1] belong to
    FP8. Query tokens of a sequence see each other causally."""
    q, cache = a["q"], a["kv_buffer"].view(len(a["kv_buffer"]), -1, 576)
    integers = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens")
    assert all(a[name].dtype == torch.int32 for name in integers), "AITER takes int32"
    assert cache.shape[1] == a["page_size"] and a["o"].dtype == torch.bfloat16 and a["o"].is_contiguous()
    of_q, of_kv = number(a.get("q_scale")), number(a.get("kv_scale"))
    queries, pages = a["qo_indptr"].tolist(), a["kv_indptr"].tolist()
    for i, last in enumerate(a["kv_last_page_lens"].tolist()):
        held = a["kv_indices"][pages[i] : pages[i + 1]].long()
        keys = cache[held].flatten(0, 1)[: (len(held) - 1) * cache.shape[1] + last, None]
        rows = slice(queries[i], min(queries[i + 1], queries[i] + a["max_seqlen_q"]))
        out = attended(q[rows], keys, keys[..., :LATENT], a["sm_scale"] * of_q * of_kv, causal=True)
        a["o"][rows] = (out * of_kv).bfloat16()
    heads, most = q.shape[1], a["max_seqlen_q"]
    if a.get("work_meta_data") is not None and heads > 16 and most > 1:
        # mla.py folds heads into sequences of 16, then hands o other memory (o_orig.set_).
        o, right = a["o"], a["o"].clone()
        o.copy_(right.view(-1, most, heads // 16, 16, LATENT).transpose(1, 2).reshape(o.shape))
        o.set_(right)


def ragged(a: Arguments) -> torch.Tensor:
    """flash_attn_varlen_func, as hopper/flash_attn_interface.py of FlashAttention 3.0.0 has it, and others
    after it: q [tokens, heads, d], k, v [keys, heads, d], cu_seqlens [batch + 1]; a grid of max_seqlen_q
    rows; descales are fp32 [batch, heads]."""
    q, k, v = a["q"], a["k"], a["v"]
    assert a["cu_seqlens_q"].dtype == a["cu_seqlens_k"].dtype == torch.int32, "it takes int32"
    queries, keys = a["cu_seqlens_q"].tolist(), a["cu_seqlens_k"].tolist()
    out = a.get("out")
    if out is None:
        out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=torch.bfloat16)
    for i in range(len(queries) - 1):
        assert keys[i + 1] - keys[i] <= a["max_seqlen_k"], "max_seqlen_k is below a sequence's length"
        rows = slice(queries[i], min(queries[i + 1], queries[i] + a["max_seqlen_q"]))
        of_q, of_k, of_v = (a[name][i] if name in a else torch.ones(1) for name in DESCALES)
        scale = a.get("softmax_scale", q.shape[-1] ** -0.5) * of_q * of_k
        seen = slice(keys[i], keys[i + 1])
        out[rows] = (attended(q[rows], k[seen], v[seen], scale, a["causal"]) * of_v[:, None]).bfloat16()
    return out


DESCALES = ("q_descale", "k_descale", "v_descale")


def ragged_of_one_scale(a: Arguments) -> torch.Tensor:
    """flash_attn_varlen_fp8_pertensor_func of aiter/ops/mha.py at e404860: descales are fp32 [1]."""
    shape = len(a["cu_seqlens_q"]) - 1, a["q"].shape[1]
    return ragged(a | {name: a[name].view(1, 1).expand(shape) for name in DESCALES})


@dataclass
class Node:
    """A tensor of cuDNN's graph: what its setters were given."""

    dim: Sequence[int] = ()
    stride: Sequence[int] = ()
    data_type: object = None
    uid: int = -1
    ragged_offset: Node | None = None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def set_it(value: Any) -> Node:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return set_it

    def flat(self, pack: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """All that lies behind its pointer."""
        given = pack[self.uid]
        assert NAMES[given.dtype] == str(self.data_type), f"{self.data_type} does not tell {given.dtype}"
        held = given.untyped_storage().nbytes() // given.element_size() - given.storage_offset()
        return given.as_strided((held,), (1,))

    def numbers(self, pack: Mapping[int, torch.Tensor]) -> list[Any]:
        return self.flat(pack).as_strided((self.dim[0],), (self.stride[0],)).tolist()

    def sequence(self, pack: Mapping[int, torch.Tensor], i: int, length: int) -> torch.Tensor:
        """[length, heads, width] of the sequence i."""
        assert self.ragged_offset is not None and length <= self.dim[2], "longer than the graph's dim"
        data, (_, heads, _, width) = self.flat(pack), self.dim
        begin = data.storage_offset() + self.ragged_offset.numbers(pack)[i]
        strides = (self.stride[2], self.stride[1], self.stride[3])
        return data.as_strided((length, heads, width), strides, begin)


NAMES = {
    torch.bfloat16: "cudnn.data_type.BFLOAT16", torch.float8_e4m3fn: "cudnn.data_type.FP8_E4M3",
    torch.float32: "cudnn.data_type.FLOAT", torch.int32: "cudnn.data_type.INT32",
    torch.int64: "cudnn.data_type.INT64",
}  # fmt: skip


SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def sdpa(a: Arguments) -> tuple[Node, ...]:
    """python/pygraph/sdpa.cpp of the front end 1.23.0: q, k and v [batch, heads, tokens, width], any strides
    (include/cudnn_frontend/node/scaled_dot_product_flash_attention.h); a ragged offset, in elements, says
    where a sequence begins (test/python/sdpa/fp16.py). The output, and of FP8 two largest values."""
    a["self"].node = a
    a["self"].output = [Node(), Node(), Node(), Node()]
    return tuple(a["self"].output[: 4 if "scale_o" in a else 2])


def execute(a: Arguments) -> None:
    """Of a graph of one such node: addresses by number; dims, strides and types are the graph's."""
    node, pack, output = a["self"].node, a["tensor_dict"], a["self"].output[0]
    assert node["use_padding_mask"], "ragged sequences need a padding mask"
    of = {name: node[name].numbers(pack)[0] if name in node else 1.0 for name in SCALES}
    lengths = zip(node["seq_len_q"].numbers(pack), node["seq_len_kv"].numbers(pack), strict=True)
    for i, (new, length) in enumerate(lengths):
        q, k, v = (node[name].sequence(pack, i, new if name == "q" else length) for name in "qkv")
        scale = node["attn_scale"] * of["descale_q"] * of["descale_k"]
        causal = node.get("use_causal_mask_bottom_right", False)
        out = attended(q, k, v, scale, causal, of["scale_s"]) * (of["descale_s"] * of["descale_v"])
        output.sequence(pack, i, new).copy_(out * of["scale_o"])


COMPUTED: Mapping[str, Answer] = {
    "flash_mla.flash_mla_with_kvcache": block_table,
    "aiter.mla_decode_fwd": page_list,
    "flash_attn_interface.flash_attn_varlen_func": ragged,
    "aiter.flash_attn_varlen_func": ragged,
    "aiter.flash_attn_varlen_fp8_pertensor_func": ragged_of_one_scale,
    "flash_attn.flash_attn_varlen_func": lambda a: (ragged(a), None),
    "cudnn.tensor": lambda a: Node(a["dim"], a["stride"], a["data_type"], a["uid"]),
    "cudnn.sdpa": sdpa,
    "cudnn.sdpa_fp8": sdpa,
    "cudnn.execute": execute,
}
"""In the place of what tests/support/answers.py has."""
