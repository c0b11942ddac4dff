"""trtllm_batch_decode_with_kv_cache_mla: flashinfer/mla/_core.py:3501-4389 and
csrc/trtllm_fmha_kernel_launcher.cu:348-537. Dense decoding by trtllm-gen and cute-dsl on sm_10x."""

import math

import torch

from flashinfer.utils import (
    arch,
    attend,
    check,
    check_shape_dtype_device,
    get_trtllm_gen_multi_ctas_kv_counter_bytes,
    vectors,
)

BLACKWELL = ("sm_100", "sm_103")


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """query [b, q, H, 576], kv_cache [pages, (1,) page, 576] -> bf16 [b, q, H, 512], causal,
    bottom right. bmm1_scale is the whole scale of the scores, and 1.0 unless given."""
    undoubled = (sinks, skip_softmax_threshold_scale_factor, cum_seq_lens_q, max_q_len, sparse_mla_top_k_lens)
    undoubled += (causal_seqlens_kv_global, lse, use_fp16_softmax)
    default = all(a is None for a in undoubled) and (sparse_mla_top_k, cp_world, cp_rank) == (0, 1, 0)
    default = default and not return_lse and not enable_dcp and uses_shared_paged_kv_idx
    check(default, "only dense decoding with a fixed q length is doubled", NotImplementedError)
    for name, scale in (("bmm1_scale", bmm1_scale), ("bmm2_scale", bmm2_scale)):
        if isinstance(scale, torch.Tensor):  # :3777
            check(scale.dtype == torch.float32, f"{name} tensor must have dtype torch.float32", TypeError)
            # launcher :465 takes one value; docstring :3753: FP8 alone supports the tensor form
            check(scale.numel() == 1 and query.dtype == torch.float8_e4m3fn, f"a tensor {name} needs FP8")
    if backend == "auto" and arch() not in BLACKWELL:  # :3833
        backend = "xqa"
    # :3851
    check(backend != "xqa", "XQA MLA requires SM120a (CUDA >= 12.8) or SM121a (CUDA >= 12.9)", ValueError)
    check(backend in ("auto", "trtllm-gen", "cute-dsl"), f"Backend {backend} not supported", ValueError)
    check(arch() in BLACKWELL, "trtllm-gen has kernels for sm_100 and sm_103 alone")
    check(seq_lens is not None, "seq_lens is required for trtllm-gen", ValueError)  # :3928
    check(
        query.dim() == 4, "query must be [b, q, H, 576]: 3 dimensions need cum_seq_lens_q", ValueError
    )  # :655
    b, q_len, heads, width = query.shape
    kv = kv_cache.unsqueeze(1) if kv_cache.dim() == 3 else kv_cache
    check(kv.dim() == 4, "Expected kv_cache.ndim == 3 or 4", ValueError)
    page = kv.shape[2]
    if backend == "cute-dsl":
        # :4709: the buffer is for trtllm-gen; monolithic/mla_decode_fp8.py can_implement
        counters = multi_ctas_kv_counter_buffer
        check(counters is None, "only supported when a trtllm-gen runner is selected", ValueError)
        check(128 % page == 0 and page > 1, f"unsupported configuration: page_size={page}", ValueError)
        check(0 < heads <= 128, f"unsupported configuration: num_heads={heads}", ValueError)
        check(isinstance(bmm1_scale, float) and isinstance(bmm2_scale, float), "needs floats", ValueError)
        check(workspace_buffer.dtype in (torch.int8, torch.uint8), "workspace_buffer is bytes")
    else:
        check(
            not 64 < heads < 128, f"trtllm-gen does not support 64 < num_heads_q < 128: {heads}", ValueError
        )
        check(
            page in (32, 64), f"trtllm-gen requires block_size in (32, 64), got {page}", ValueError
        )  # :3954
    if multi_ctas_kv_counter_buffer is not None:  # utils.py:897; the double's device has 4 processors
        given = multi_ctas_kv_counter_buffer
        least = get_trtllm_gen_multi_ctas_kv_counter_bytes(b, heads, 4)
        check(given.is_contiguous(), "multi_ctas_kv_counter_buffer must be contiguous", ValueError)
        check(given.nbytes >= least, f"multi_ctas_kv_counter_buffer is too small: {given.nbytes}", ValueError)
        check(not given.any(), "work groups wait for counters that are not zero at first")
    dims = (kv_lora_rank, qk_rope_head_dim) == (512, 64)  # :106; qk_nope_head_dim is not read
    check(dims, "Unsupported MLA dimensions (the double takes DeepSeek's 512 + 64)", ValueError)
    check(width == kv.shape[3] == 576, "Expected head dim 576 for query and kv_cache", ValueError)  # :695
    check(block_tables.dim() == 2, "block_tables must be 2D", ValueError)
    check(len(block_tables) == b, "Expected the batch size of query for block_table", ValueError)
    # :721, only asked where backend is not named trtllm-gen
    aligned = backend == "trtllm-gen" or block_tables.shape[1] % (128 / page) == 0
    check(aligned, "Expected block_num % (128 / block_size) == 0", ValueError)
    # the launcher reads bare pointers: int32, dense rows, one kv head, strides of 16 bytes
    for name, t in (("block_tables", block_tables), ("seq_lens", seq_lens)):
        check(t.dtype == torch.int32 and t.is_contiguous(), f"{name} is read as contiguous int32")
    check(seq_lens.shape == (b,), "seq_lens must have shape [b]")
    check(kv.shape[1] == 1, "MLA has one kv head")
    check(query.dtype in (torch.bfloat16, torch.float8_e4m3fn), "trtllm-gen MLA: query is bf16 or e4m3")
    check(kv.dtype == query.dtype, "trtllm-gen MLA: kv_cache has the dtype of query")
    flat = query.flatten(0, 1)
    vectors(flat, "query"), vectors(kv, "kv_cache")
    check(workspace_buffer.is_contiguous(), "workspace_buffer must be contiguous")
    shape = (b, q_len, heads, kv_lora_rank)
    if out is None:
        out = torch.full(shape, math.nan, dtype=torch.bfloat16)
    else:
        check_shape_dtype_device(out, shape, torch.bfloat16, query.device, "out")
        check(out.is_contiguous(), "out is written as contiguous")
    check(
        int(seq_lens.max()) <= max_seq_len,
        "max_seq_len is shorter than a sequence: the schedule misses tokens",
    )
    for i, length in enumerate(seq_lens.tolist()):
        check(length <= page * block_tables.shape[1], "illegal memory access: beyond the block table")
        token = torch.arange(length)
        pages = block_tables[i][token // page].long()
        check(
            bool(((pages >= 0) & (pages < len(kv))).all()), "illegal memory access: a page beyond the cache"
        )
        keys = kv[pages, 0, token % page][:, None].float()
        o, _ = attend(query[i], keys, keys[..., :512], float(bmm1_scale), True)
        out[i] = (o * float(bmm2_scale)).to(out.dtype)
    return out
