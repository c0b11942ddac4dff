"""vLLM's prefill on x86-64 servers: the kernel that SGLang and vLLM built for these, and what vLLM runs
itself for MLA: dense attention in torch, one request after the other."""

from __future__ import annotations

from kernels.binding import Function, Symbol
from kernels.lazy import torch
from kernels.mha_prefill.layouts import new_tokens, new_tokens_bytes
from kernels.mha_prefill.operands import VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes, takes
from kernels.op import Call, Prepared, implementation
from kernels.support import Support, need
from kernels.vendor import Vllm, VllmCpu, vllm_operator

EXTEND = vllm_operator("extend_attention_cpu", positions=18)
PLACE = "vllm.v1.attention.backends.mla.prefill.cpu_sdpa.CPUSDPAMLAPrefillBackend"
BACKEND = Symbol(PLACE)
ATTEND = Function(f"{PLACE}._ragged_sdpa", positions=7)


@implementation(
    "vllm.extend",
    VllmCpu,
    symbols=(EXTEND,),
    onednn_isa="AVX512_CORE_BF16",
    rebinds=True,
    fits=takes("bf16"),
    # The table of rows, and copies of the new tokens' keys and values.
    workspace=lambda sizes: 8 * sizes.batch * sizes.most_keys + new_tokens_bytes(sizes),
)
def extend(o: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
    """`extend_attention_cpu` (SGLang's CPU kernel): it attends to the cached keys, whose rows a table gives,
    then to the new ones with a causal mask. Built on oneDNN's brgemm, which takes AMX tiles or else AVX-512.
    vLLM's backend AMX_MLA calls it absorbed, on latents; SGLang's backend `intel_amx` calls it as here."""
    k, v, update = new_tokens(o)
    table = torch.zeros(len(o.sequences), o.sizes.most_keys, dtype=torch.int64)
    for row, s in zip(table, o.sequences, strict=True):
        row[: s.length] = torch.arange(s.keys.start, s.keys.stop)
    table_rows = torch.arange(len(o.sequences))
    lengths = torch.tensor([s.length for s in o.sequences])
    new = torch.tensor([s.new for s in o.sequences])
    tables = (table, table_rows, lengths, new, o.cu_q[:-1].long(), o.sizes.most_new)
    # The last five are logit_cap, is_cross_attn, sliding_window_size, encoder_lens and sinks.
    call = EXTEND.bind(o.q, k, v, out, o.k, o.v, *tables, o.scale, 0.0, False, 0, None, None)
    return Prepared(o, out, call, after_load=update)


def dense_bytes(sizes: MhaPrefillSizes) -> int:
    """The bytes of the longest sequence's scores, three times, mask and operands, and of two outputs."""
    longest = sizes.most_new  # no keys are cached
    scores = longest * longest * (3 * 4 * sizes.heads + 1)
    operands = longest * sizes.heads * 4 * (2 * WIDTH + 3 * VALUE)
    return scores + operands + 4 * sizes.queries * sizes.heads * VALUE


@implementation(
    "vllm.dense",
    Vllm,
    requires="vLLM's CPU build",
    since="0.32",
    kinds=("cpu",),
    allocates=True,
    rebinds=True,
    symbols=(BACKEND, ATTEND),
    fits=lambda sizes: Support.all_of(
        takes("bf16")(sizes), need(sizes.keys == sizes.queries, "takes no cached prefix")
    ),
    workspace=dense_bytes,
)
def dense(o: MhaPrefillOperands, out: None) -> Call:
    """`CPUSDPAMLAPrefillBackend._ragged_sdpa` of vLLM 0.32: the scores of all heads in fp32, written out."""
    backend_class = BACKEND.find()
    # Without the engine's settings that its constructor wants: the function reads the scale alone.
    backend = backend_class.__new__(backend_class)
    backend.scale = o.score_scale
    is_causal, returns_log_sums = True, False
    return ATTEND.bind(o.q, o.k, o.v, o.cu_q, o.cu_k, is_causal, returns_log_sums, method_of=backend)
