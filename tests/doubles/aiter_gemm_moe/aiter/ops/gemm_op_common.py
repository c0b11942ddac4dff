"""aiter/ops/gemm_op_common.py; the body is csrc/py_itfs_cu/gemm_common.cu:13 getPaddedM."""

from ..jit.core import compile_ops


@compile_ops("module_gemm_common", fc_name="getPaddedM", ffi_type="ctypes")
def get_padded_m(M: int, N: int, K: int, gl: int) -> int:
    if gl == 0:
        step = 16 if M <= 256 else 32 if M <= 1024 else 64 if M <= 4096 else 128
        return -(-M // step) * step
    if gl == 1:
        return 8192 if M > 8192 and N > 4096 else 1 << (M - 1).bit_length()
    return M
