"""The assembly MLA decode kernels there are: csrc/py_itfs_cu/asm_mla.cu and hsa/ARCH/mla/mla_asm.csv."""

from __future__ import annotations

from dataclasses import dataclass

from .strict import check

# hsa/gfx942/mla/mla_asm.csv and hsa/gfx950/mla/mla_asm.csv, prefill=0 and cprr=0:
# (qType, kvType, ps) -> {(Gqa, qSeqLen): modes}; c: causal, C: causal with LSE, n: no mask, N: that with LSE
_TABLE = {
    "gfx942": {
        ("bf16", "bf16", 0): {(8, 1): "c", (16, 1): "c", (16, 4): "c", (16, 8): "c"}
        | {(32, 0): "c", (64, 0): "c", (128, 0): "c"},
        ("bf16", "bf16", 1): {(8, 2): "c", (16, 4): "c"},
        ("bf16", "fp8", 1): {(16, 4): "c"},
        ("fp8", "fp8", 0): {(8, 1): "c", (16, 1): "c", (16, 2): "c", (16, 4): "c", (128, 0): "c"},
        ("fp8", "fp8", 1): {(16, 1): "c", (16, 2): "c", (16, 4): "c", (64, 1): "cC", (128, 0): "c"},
    },
    "gfx950": {
        ("bf16", "bf16", 0): {(8, 1): "c", (8, 2): "c", (16, 1): "c", (16, 4): "c", (16, 8): "c"}
        | {(32, 0): "c", (64, 0): "c", (64, 1): "c", (128, 0): "c"},
        ("bf16", "bf16", 1): {(16, 4): "cC", (32, 4): "cCnN", (64, 1): "cCnN"},
        ("bf16", "fp8", 1): {(16, 4): "c"},
        ("fp8", "fp8", 0): {(8, 1): "c", (16, 1): "cn", (16, 2): "c", (16, 4): "cn", (128, 0): "cn"},
        ("fp8", "fp8", 1): {(8, 4): "cCnN", (16, 1): "cCnN", (16, 2): "c", (16, 4): "cCnN"}
        | {(32, 1): "cC", (32, 4): "cCnN"},
    },
}


@dataclass(frozen=True)
class Kernel:
    masks: bool  # hides the keys after a query token's own


def kernel(
    arch: str, q: str, kv: str, gqa: int, qlen: int, persistent: bool, causal: bool, lse: bool
) -> Kernel:
    """asm_mla.cu mla_decode_stage1_asm_fwd: the configuration that is looked up, and the look-up."""
    pair = (q, kv)
    look_gqa, look_qlen, ps = gqa, qlen, persistent
    if gqa == 128:
        look_qlen = 0
        if pair == ("bf16", "bf16") and arch == "gfx942":
            ps = False
    elif gqa == 16:
        if pair == ("bf16", "bf16"):
            if persistent:
                look_qlen = 4 if qlen <= 4 else qlen
            else:
                look_qlen = 1 if qlen == 1 else 4 if qlen <= 4 else 8
        elif pair == ("bf16", "fp8"):
            look_qlen = 4 if persistent and qlen <= 4 else qlen
        elif q == "fp8":
            if 2 < qlen <= 4:
                look_qlen = 4
            elif qlen > 4:
                check(
                    persistent and arch == "gfx950",
                    "only support gqa_ratio=16 fp8 mla decoding with qo_len <= 4",
                )
                look_gqa, look_qlen = 32, 4
    elif gqa == 32:
        if pair == ("bf16", "bf16") and not persistent:
            look_qlen = 0
        elif pair == ("fp8", "fp8"):
            known = qlen == 1 or (persistent and (qlen == 2 or arch == "gfx950"))
            check(known, "fp8/fp8 with gqa_ratio=32 only supports decode_qlen=1,2 in persistent mode")
            look_qlen = 4 if qlen >= 3 else qlen
    elif gqa == 64:
        if pair == ("bf16", "bf16") and not persistent:
            look_qlen = 1 if qlen == 1 else 0
        elif pair == ("fp8", "fp8"):
            check(persistent, "fp8/fp8 with gqa_ratio=64 only supports persistent mode")
            look_qlen = 1 if qlen == 1 else 4
    if arch == "gfx950" and persistent:  # the wider kernels take other head counts in passes
        if pair == ("bf16", "bf16"):
            if (gqa * qlen >= 128 or gqa > 64) and gqa != 48:
                look_gqa, look_qlen = 32, 4
            elif gqa * qlen >= 64 or gqa >= 16:
                look_gqa, look_qlen = 64, 1
        elif pair == ("fp8", "fp8"):
            if (gqa == 32 and qlen >= 4) or (gqa == 64 and qlen >= 2) or gqa == 128:
                look_gqa, look_qlen = 32, 4
            elif (
                (gqa == 16 and qlen in (3, 4)) or (gqa == 32 and qlen in (2, 3)) or (gqa == 64 and qlen == 1)
            ):
                look_gqa, look_qlen = 16, 4
    masked = causal or qlen == 1  # one query token shares the masked kernel
    with_lse = lse and persistent
    mode = {(True, False): "c", (True, True): "C", (False, False): "n", (False, True): "N"}[masked, with_lse]
    modes = _TABLE[arch].get((q, kv, int(ps)), {}).get((look_gqa, look_qlen), "")
    check(
        mode in modes,
        "get_heuristic_kernel_mla: cannot get heuristic kernel!"
        f" q_type:{q} kv_type:{kv} gqa:{look_gqa} ps:{int(ps)} prefill:0 causal:{int(masked)}"
        f" qseqlen:{look_qlen} lse:{int(with_lse)} cprr:0",
    )
    # gfx942's persistent 128-head FP8 kernel is
    # "mla_a8w8_qh128_m32x4_n16x2_msk0_ps": the planner trims instead
    unmasked = arch == "gfx942" and (*pair, gqa, ps) == ("fp8", "fp8", 128, True)
    return Kernel(masks=masked and not unmasked)


def granule(nhead: int, qlen: int, q: str, kv: str) -> int:
    """aiter/mla.py mla_decode_fwd `mgc`: the tokens in which a split is counted."""
    if (nhead == 128 and q == kv == "fp8") or (nhead == 64 and q == kv == "bf16" and qlen == 1):
        return 32
    if nhead in (8, 16) and (qlen == 1 or (nhead == 8 and qlen == 2)):
        return 64
    return 16
