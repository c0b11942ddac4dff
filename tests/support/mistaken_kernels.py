"""Kernels as users write them, in plain torch, each with one common bug, brought into runs by
KERNEL_BENCH_PLUGINS. `OF` says which bug: op -> row -> the name that the diagnosis is to give it."""

import sys

import torch

from kernels.op import implementation

OF: dict[str, dict[str, str]] = {}


def mistaken(op, **bugs):
    """Declares a row for each bug of a function of (operands, out, **bug), which does a call's work. bugs: by
    the row's name, the bug's argument and the name that it is to be given."""

    def declare(function):
        OF[op] = {}
        for row, (bug, called) in bugs.items():

            def prepare(o, out, bug=bug):
                return lambda: function(o, out, **bug)

            made = implementation(f"mistaken.{row}", op=op, requires="a test")(prepare)
            made.__module__ = __name__
            setattr(sys.modules[__name__], f"{op}_{row}", made)
            OF[op][f"mistaken.{row}"] = called
        return function

    return declare


@mistaken(
    "mla_decode",
    scale=({"scale": 576**-0.5}, "scale 1/sqrt(576)"),
    last=({"drop": 1}, "last token left out"),
    rope=({"used": 512}, "rope part left out"),
    unnormalised=({"normalised": False}, "softmax weights not divided by their sum"),
)
def decode(o, out, scale=None, drop=0, used=576, normalised=True):
    page, cache = o.kv.shape[1], o.kv.reshape(-1, 576)
    for i, length in enumerate(o.lengths.tolist()):
        token = torch.arange(length - drop)
        table = o.page_table[i].long()
        slots = table[token // page] * page + token % page
        kv = cache[slots].float() * o.kv_scale
        scores = o.q[i, ..., :used].float() @ kv[:, :used].T * (scale or o.scale)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        result = weights.bfloat16().float() @ kv[:, :512]
        out[i] = result / weights.sum(-1, keepdim=True) if normalised else result


@mistaken(
    "mha_prefill",
    scale=({"scale": 128**-0.5}, "scale 1/sqrt(128)"),
    mask=({"causal": False}, "no causal mask"),
    prefix=({"aligned": False}, "causal mask aligned to the first key"),
    rope=({"used": 128}, "rope part left out"),
    heads=({"shift": 1}, "keys of the previous head"),
)
def prefill(o, out, scale=192**-0.5, causal=True, aligned=True, used=192, shift=0):
    queries, keys = o.cu_q.tolist(), o.cu_k.tolist()
    for i in range(len(queries) - 1):
        q = o.q[queries[i] : queries[i + 1], :, :used].float()
        k = o.k[keys[i] : keys[i + 1], :, :used].float().roll(shift, 1)
        v = o.v[keys[i] : keys[i + 1]].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if causal:
            behind = len(k) - len(q) if aligned else 0
            hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(behind + 1)
            scores.masked_fill_(hidden, -torch.inf)
        out[queries[i] : queries[i + 1]] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@mistaken(
    "block_scale_gemm",
    scale_a=({"of_a": False}, "a's scales left out"),
    scale_b=({"of_b": False}, "b's scales left out"),
    last=({"blocks": -1}, "last block of K left out"),
    transposed=({"transposed": True}, "b's scales transposed"),
)
def gemm(o, out, of_a=True, of_b=True, blocks=None, transposed=False):
    a, b, scale_b = o.a_q.float(), o.b_q.float(), o.b_scale
    if transposed:
        scale_b = scale_b.flatten().view(scale_b.shape[::-1]).T
    total = torch.zeros(len(a), len(b))
    for block in range(o.b_scale.shape[1])[:blocks]:
        k = slice(block * 128, (block + 1) * 128)
        product = a[:, k] @ b[:, k].T
        if of_a:
            product = product * o.a_scale[:, block, None]
        if of_b:
            product = product * scale_b[:, block].repeat_interleave(128)[: len(b)]
        total += product
    out.copy_(total)


@mistaken(
    "fused_moe",
    swapped=({"swapped": True}, "gate and up swapped"),
    silu=({"act": torch.nn.functional.gelu}, "GELU for SiLU"),
    weights=({"weighted": False}, "routing weights left out"),
    last=({"picks": -1}, "last chosen expert left out"),
    scale=({"of_w2": False}, "w2's scales left out"),
)
def moe(o, out, swapped=False, act=torch.nn.functional.silu, weighted=True, picks=None, of_w2=True):
    def blocks(scale):
        return scale.repeat_interleave(128, -2).repeat_interleave(128, -1)

    x = o.x_q.float() * o.x_scale.repeat_interleave(128, -1)
    total = torch.zeros(len(x), out.shape[1])
    for token, ids in enumerate(o.topk_ids.tolist()):
        for place, expert in list(enumerate(ids))[:picks]:
            if expert < 0:  # of another rank
                continue
            w13, w2 = o.w13[expert].float() * blocks(o.w13_scale[expert]), o.w2[expert].float()
            up, gate = (w13 @ x[token]).chunk(2)[:: 1 if swapped else -1]
            if of_w2:
                w2 = w2 * blocks(o.w2_scale[expert])
            y = w2 @ (act(gate) * up)
            total[token] += y * o.topk_weights[token, place] if weighted else y
    out.copy_(total)
