"""csrc/py_itfs_cu/asm_mla.cu of v0.1.9: the kernels by head count and dtype, on both architectures alike."""

from __future__ import annotations

from ._double.asm_kernels import Kernel
from ._double.strict import check, doubled

# (q, kv, persistent) -> head counts, for one query token
_TABLE = {
    ("bf16", "bf16", False): (16, 128),
    ("bf16", "bf16", True): (16, 128),  # 128: the kernel of the other mode, which reads no work
    ("bf16", "fp8", True): (16,),
    ("fp8", "fp8", False): (16, 128),
    ("fp8", "fp8", True): (16, 128),
}


def kernel(
    arch: str, q: str, kv: str, gqa: int, qlen: int, persistent: bool, causal: bool, lse: bool
) -> Kernel:
    doubled(qlen == 1, "more than one query token each")
    known = gqa in _TABLE.get((q, kv, persistent), ())
    check(
        known, "mla_decode_stage1_asm_fwd: unsupport current data type or shape. please refer to asm_mla.cu"
    )
    doubled((q, gqa, persistent) != ("bf16", 128, True), "bf16 of 128 heads with a plan")
    return Kernel(masks=True)


def step_of(nhead: int, qlen: int, q: str = "", kv: str = "") -> int:
    """aiter/mla.py mla_decode_fwd `mgc`: the tokens in which a split is counted."""
    return 64 if nhead == 16 and qlen == 1 else 16
