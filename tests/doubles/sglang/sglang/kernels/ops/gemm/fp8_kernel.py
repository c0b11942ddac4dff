"""kernels/ops/gemm/fp8_kernel.py of SGLang 0.5.23: the block-scaled FP8 GEMM in Triton. SGLang calls it in
srt/layers/quantization/fp8_utils.py:1829 with row-major scales from per_token_group_quant_fp8 and
`output_dtype` that of the input."""

import torch

from ...._kernel import cdiv, fp8, power_of_two


def w8a8_block_fp8_matmul_triton(A, B, As, Bs, block_size, output_dtype=torch.float16):
    """Line 776; the assertions are those of prepare_block_fp8_matmul_inputs, line 686."""
    assert len(block_size) == 2
    block_n, block_k = block_size
    assert A.shape[-1] == B.shape[-1], "K of A and B"
    assert A.shape[:-1] == As.shape[:-1], "rows of A and As"
    assert A.is_contiguous(), "A is contiguous"
    assert B.ndim == 2 and B.is_contiguous(), "B is contiguous"
    assert Bs.ndim == 2, "Bs has two dimensions"
    n, k = B.shape
    if As.dtype != torch.float32 or Bs.dtype != torch.float32:
        # int32 passes the assertions (packed UE8M0, for DeepGEMM); the Triton kernel reads it as numbers.
        raise NotImplementedError(f"scales of {As.dtype} and {Bs.dtype}")
    assert As.shape[-1] == cdiv(k, block_k), "columns of As"
    assert tuple(Bs.shape) == (cdiv(n, block_n), cdiv(k, block_k)), "shape of Bs"
    if not (power_of_two(block_n) and power_of_two(block_k)):
        raise ValueError("arange's range must be a power of 2")  # the default configuration, line 824
    for name, tensor in (("A", A), ("B", B)):
        if tensor.dtype != fp8():
            raise RuntimeError(f"{name} is {tensor.dtype}: the dot product would not be of {fp8()}")
    if output_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise RuntimeError(f"C of {output_dtype} gets fp32")
    a = A.float().view(-1, k) * As.reshape(-1, As.shape[-1]).repeat_interleave(block_k, 1)[:, :k]
    scales = Bs.repeat_interleave(block_n, 0)[:n].repeat_interleave(block_k, 1)[:, :k]
    return (a @ (B.float() * scales).T).to(output_dtype).view(*A.shape[:-1], n)
