"""vLLM's two CPU kernels for MLA decode: the ones it serves DeepSeek with on x86-64 servers."""

from __future__ import annotations

from kernels.lazy import torch
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands, takes
from kernels.mla_decode.providers.vllm import splits_for
from kernels.op import Call, implementation
from kernels.vendor import VllmCpu, vllm_operator

VEC = vllm_operator("mla_decode_kvcache", positions=6)
VEC_PAGE = 16  # built into the kernel

AMX = vllm_operator("decode_attention_cpu", positions=17)

MOST_SPLITS = 64  # planned for


@implementation(
    "vllm.vec",
    VllmCpu,
    requires="vLLM's CPU build, AVX-512 with bf16",
    symbols=(VEC,),
    rebinds=True,
    stationary=lambda operands: operands.split_pages(VEC_PAGE),
    fits=takes("bf16", pages_of=VEC_PAGE),
)
def vec(operands: MlaDecodeOperands, out: torch.Tensor, table: torch.Tensor) -> Call:
    """`mla_decode_kvcache`, of the backend CPU_MLA: one thread for each sequence."""
    o = operands
    return VEC.bind(out, o.q, o.kv.view(-1, VEC_PAGE, WIDTH), o.scale, table, o.lengths)


def tables(operands: MlaDecodeOperands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of tokens, int32 [batch, tokens], the requests and the lengths, int64 [batch]."""
    return operands.split_pages(1), torch.arange(len(operands.q)), operands.lengths.long()


@implementation(
    "vllm.amx",
    VllmCpu,
    symbols=(AMX,),
    onednn_isa="AVX512_CORE_BF16",
    rebinds=True,
    stationary=tables,
    fits=takes("bf16"),
    workspace=lambda sizes: sizes.batch * sizes.heads * MOST_SPLITS * (LATENT + 1) * 4 + sizes.tokens * 4,
)
def amx(
    operands: MlaDecodeOperands, out: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> Call:
    """`decode_attention_cpu` (SGLang's CPU kernel), of the backend AMX_MLA: split over the cache, with a
    combine. Built on oneDNN's brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not."""
    o, kv = operands, operands.kv.view(-1, 1, WIDTH)
    # As _compute_num_kv_splits of vllm/v1/attention/backends/mla/amx_mla.py of vLLM 0.32.
    splits = splits_for(max(o.host_lengths), torch.get_num_threads())
    partial = torch.zeros(*o.q.shape[:2], splits, LATENT + 1)
    no_new_tokens = (None, None, None)
    given = (o.q, kv, kv[..., :LATENT], out, *no_new_tokens, partial, *tables, o.scale)
    return AMX.bind(*given, 0.0, False, 0, None, None)
