"""vLLM's CPU kernels for prefill: the one that SGLang and vLLM built for x86-64 servers, and what vLLM itself
runs for MLA, dense attention in torch, one request after the other."""

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
    # Its table of rows, and the new tokens' keys and values where they are apart from cached ones.
    workspace=lambda sizes: 8 * sizes.batch * sizes.longest[1] + new_tokens_bytes(sizes),
)
def extend(o: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
    """`extend_attention_cpu` (SGLang's CPU kernel): cached keys through a table of rows, then the new ones,
    causal. Built on oneDNN's brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not. vLLM's
    backend AMX_MLA calls it absorbed, on the latents; SGLang's `intel_amx` backend as here, with heads."""
    (k, v, copy), (most_new, longest) = new_tokens(o), o.sizes.longest
    table = torch.zeros(len(o.sequences), longest, dtype=torch.int64)
    for row, s in zip(table, o.sequences, strict=True):
        row[: s.length] = torch.arange(s.keys.start, s.keys.stop)
    lengths = torch.tensor([s.length for s in o.sequences]), torch.tensor([s.new for s in o.sequences])
    places = (table, torch.arange(len(o.sequences)), *lengths, o.cu_q[:-1].long())
    given = (o.q, k, v, out, o.k, o.v, *places, most_new, o.scale)
    return Prepared(o, out, EXTEND.bind(*given, 0.0, False, 0, None, None), after_load=copy)


def dense_bytes(sizes: MhaPrefillSizes) -> int:
    """Scores, mask and probabilities of the longest sequence, its operands in fp32, the output twice."""
    longest, _ = sizes.longest
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
    backend = backend_class.__new__(backend_class)  # the function reads its scale alone
    backend.scale = o.score_scale
    return ATTEND.bind(o.q, o.k, o.v, o.cu_q, o.cu_k, True, False, method_of=backend)
