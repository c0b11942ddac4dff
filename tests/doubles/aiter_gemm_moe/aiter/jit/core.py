"""aiter/jit/core.py: where tuned tables are, and how a compiled kernel becomes an entry point."""

import os
from pathlib import Path

from .utils.torch_guard import torch_compile_guard

AITER_ROOT_DIR = str(Path(__file__).resolve().parents[2])
AITER_LOG_TUNED_CONFIG = int(os.getenv("AITER_LOG_TUNED_CONFIG", "0"))


class AITER_CONFIG:
    """core.py:169. Each is a path; the variable of the same name without _FILE says another one. The real one
    merges the tables of aiter/configs/model_configs into one temporary file; the double has one table each,
    with invented rows for small sizes."""

    def _file(self, variable, name):
        return os.getenv(variable) or f"{AITER_ROOT_DIR}/aiter/configs/{name}.csv"

    @property
    def AITER_CONFIG_GEMM_A8W8_FILE(self):
        return self._file("AITER_CONFIG_GEMM_A8W8", "a8w8_blockscale_tuned_gemm")

    @property
    def AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_FILE(self):
        return self._file("AITER_CONFIG_GEMM_A8W8_BLOCKSCALE", "a8w8_blockscale_tuned_gemm")

    @property
    def AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE_FILE(self):
        name = "a8w8_blockscale_bpreshuffle_tuned_gemm"
        return self._file("AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE", name)

    @property
    def AITER_CONFIG_FMOE_FILE(self):
        return self._file("AITER_CONFIG_FMOE", "tuned_fmoe")


AITER_CONFIGS = AITER_CONFIG()


def compile_ops(module, fc_name=None, gen_fake=None, ffi_type="pybind", develop=False):
    """core.py:1658: a signature in front of a compiled kernel; in the double its body computes."""

    def decorator(func):
        return torch_compile_guard(device="cuda", gen_fake=gen_fake, calling_func_=func)(func)

    return decorator
