"""aiter/ops/triton/__init__.py: the flat module names of up to v0.1.9 still resolve
(_BACKWARD_COMPAT_MAP)."""

import importlib
import importlib.util
import sys
from types import SimpleNamespace

_BACKWARD_COMPAT_MAP = {
    "gemm_a8w8_blockscale": "gemm.basic.gemm_a8w8_blockscale",
    "moe_align_block_size": "moe.moe_align_block_size",
    "moe_op": "moe.moe_op",
    "moe_config_utils": "utils.moe_config_utils",
}


def __getattr__(name):
    if name in _BACKWARD_COMPAT_MAP:
        module = importlib.import_module(f"aiter.ops.triton.{_BACKWARD_COMPAT_MAP[name]}")
        sys.modules[f"aiter.ops.triton.{name}"] = module
        return module
    raise AttributeError(f"module 'aiter.ops.triton' has no attribute '{name}'")


def _backward_compat_find_spec(fullname, path, target=None):
    if fullname.startswith("aiter.ops.triton.") and fullname.count(".") == 3:
        name = fullname.split(".")[-1]
        if name in _BACKWARD_COMPAT_MAP:
            new_path = f"aiter.ops.triton.{_BACKWARD_COMPAT_MAP[name]}"
            sys.modules[fullname] = importlib.import_module(new_path)
            return importlib.util.find_spec(new_path)
    return None


sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "double", None) != "aiter_gemm_moe"]
sys.meta_path.insert(0, SimpleNamespace(find_spec=_backward_compat_find_spec, double="aiter_gemm_moe"))
