"""Op classes, into which a step's time is split: the suite's ops, and all that stands between them.

Traces, the model, replay and the ledger use these names, so that a share of one can be set beside another's.
"""

from __future__ import annotations

OP_CLASSES = {
    "block_scale_gemm": "FP8 block-scale products: the linears of attention, dense and shared-expert layers",
    "fused_moe": "the experts' grouped products, and the activation between them",
    "mla_decode": "attention over the latent cache: of decode, and sparse of both, with its combine",
    "indexer": "sparse attention's choice of tokens: the indexer's logits, their top-k and what feeds them",
    "mha_decode": "attention of decode over cached keys and values, no latent, with its combine",
    "mha_prefill": "attention of prefill; of training forward and backward",
    "attention": "attention by a kernel for prefill and decode alike, in a step of both or of no known phase",
    "absorbed_bmm": "the batched products that kv_b becomes in decode",
    "scaled_gemm": "products of FP8 by tensor or token, INT8 or FP4: quantised, but not block-scaled",
    "bf16_gemm": "other products: router, lm_head, embedding in bf16 or fp32",
    "moe_routing": "top-k, sorting and aligning tokens by expert, their permutation and weighted sum",
    "quantise": "activations to FP8, where it is a kernel of its own",
    "norm": "RMS norms, with their residual sum",
    "rope_kv": "rotary embedding, and writing the KV cache",
    "activation": "SiLU and product of dense and shared-expert layers",
    "all_reduce": "all-reduce, all-gather and reduce-scatter of tensor and data parallelism",
    "all_to_all": "dispatch and combine of expert parallelism, and sends between ranks",
    "sampling": "logits to tokens",
    "copy": "copies, casts, fills and layout changes",
    "elementwise": "other pointwise and reducing kernels",
    "host": "time in which the device waits for the host",
    "unknown": "kernels that no rule knows: listed by name, never dropped",
}

COMMUNICATION = ("all_reduce", "all_to_all")
