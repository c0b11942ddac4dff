"""How a release of AITER looks into its tables, read in its source."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.tables.files import TableError

if TYPE_CHECKING:
    from kernels.tables.files import Files

RECORDED = "aiter/rules.json"
"""Of recorded extracts, which hold no source: these rules as JSON."""


FORMATS = {"gfx942": "torch.float8_e4m3fnuz", "gfx950": "torch.float8_e4m3fn"}
"""The FP8 that AITER gives each architecture (`aiter/utility/dtypes.py`); others have e4m3fn."""


@dataclass(frozen=True)
class Rules:
    """What differs between releases.

    merges:        model_configs/ is joined to the default file (`aiter/jit/core.py`)
    duplicates_raise: of keys in a merge; before, the fastest was kept
    infers_gfx:    the merge takes a missing gfx from cu_num
    moe_gfx:       the key of tuned_fmoe begins with gfx (`aiter/fused_moe.py` `get_2stage_cfgs`)
    moe_strips:    with an expert mask, topk of the key is one less than the columns of topk_ids
    moe_act:       act_type `exact`, `blind` (never compared), or `exact, then blind`
    moe_empty_tag: only rows whose _tag is empty; else all but `flydsl_fallback`
    moe_tiers:     tokens from which no power of two is asked but these
    one_stage:     a multiple of inter_dim that the 1-stage kernel needs after a miss
    bounds:        of M_LEQ_ and M_GEQ_ (`aiter/ops/triton/utils/gemm_config_utils.py`)
    nested:        Triton configurations are looked for in ARCH/BACKEND/gemm/TYPE/ first
    backends:      and in gemm/BACKEND/
    assumed:       what the source did not tell; empty where it told all
    """

    merges: bool = True
    duplicates_raise: bool = True
    infers_gfx: bool = True
    moe_gfx: bool = True
    moe_strips: bool = True
    moe_act: str = "blind"
    moe_empty_tag: bool = False
    moe_tiers: tuple[int, ...] = (32768, 131072)
    one_stage: int = 128
    bounds: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    nested: bool = True
    backends: bool = True
    assumed: str = ""

    def keeps_tag(self, tag: str) -> bool:
        return tag == "" if self.moe_empty_tag else tag != "flydsl_fallback"

    def token(self, tokens: int) -> int:
        """`get_padded_M` of `aiter/fused_moe.py`."""
        if tokens < self.moe_tiers[0]:
            return power_of_two(tokens)
        return max(tier for tier in self.moe_tiers if tokens >= tier)


def fp8_of(arch: str) -> str:
    return FORMATS.get(arch, "torch.float8_e4m3fn")


def padded(m: int, n: int) -> list[int]:
    """M as a GEMM is looked for, in order: itself, then twice padded (csrc/py_itfs_cu/gemm_common.cu)."""
    step = 16 if m <= 256 else 32 if m <= 1024 else 64 if m <= 4096 else 128
    coarse = 8192 if m > 8192 and n > 4096 else power_of_two(m)
    return list(dict.fromkeys((m, -(-m // step) * step, coarse)))


def power_of_two(m: int) -> int:
    """The smallest that is not below m."""
    return 1 << max(m - 1, 0).bit_length()


def read_rules(files: Files) -> Rules:
    """Of a checkout or wheel, or as they were recorded; the newest ones where neither tells."""
    if files.has(RECORDED):
        try:
            told = json.loads(files.text(RECORDED))
            lists = {name: tuple(map(int, value)) for name, value in told.items() if isinstance(value, list)}
            rules = Rules(**{**told, **lists})
            kinds = zip(dataclasses.astuple(rules), dataclasses.astuple(Rules()), strict=True)
            whole = rules.one_stage and rules.moe_tiers and rules.bounds
            if whole and all(type(value) is type(default) for value, default in kinds):
                return rules
        except (TableError, ValueError, TypeError, AttributeError, RecursionError):
            pass
        return Rules(assumed=f"{RECORDED} cannot be read")
    core = _source(files, "aiter/jit/core.py")
    moe = _source(files, "aiter/fused_moe.py")
    triton = _source(files, "aiter/ops/triton/utils/gemm_config_utils.py")
    missing = [
        name
        for name, text in (("jit/core.py", core), ("fused_moe.py", moe), ("gemm_config_utils.py", triton))
        if not text
    ]
    rules = Rules(assumed=f"it has no readable {', '.join(missing)}" if missing else "")
    if core:
        rules = dataclasses.replace(
            rules,
            merges="model_configs" in core,
            duplicates_raise="re-run" in core,
            infers_gfx="gfx_from_cu_num" in core,
            assumed=rules.assumed
            or ("" if "all_cols" in core else "older than v0.1.13, and read as that is"),
        )
    if moe:
        rules = _moe_rules(rules, moe)
    if triton:
        bounds = re.search(r"STANDARD_M_BOUNDS = \((\d[\d, ]{,199})\)", triton)
        rules = dataclasses.replace(
            rules,
            bounds=tuple(int(bound) for bound in re.findall(r"\d+", bounds[1])) if bounds else rules.bounds,
            nested="_dtype_dir(" in triton,
            backends="/{backend}" in triton,
        )
    return rules


def _moe_rules(rules: Rules, moe: str) -> Rules:
    told = re.search(r"_PADDED_M_TIERS = \[(\d[\d, ]{,99})\]", moe)
    one_stage = re.search(r"run_1stage = token > 32 and \(inter_dim % ([1-9]\d{,8}) == 0\)", moe)
    keys = re.search(r"\n    keys = \((.*?)\n    \)", moe, re.DOTALL)
    by_text = bool(keys and "str(activation)" in keys[1])
    blind = "_ACT_TYPE_DISABLED_KEY" in moe
    return dataclasses.replace(
        rules,
        moe_gfx=bool(re.search(r'_INDEX_COLS = \[\s*"gfx"', moe)),
        moe_strips="topk -= int(is_ep)" in moe,
        moe_act=("exact, then blind" if by_text else "blind") if blind else "exact",
        moe_empty_tag='df["_tag"].fillna("") == ""' in moe,
        moe_tiers=tuple(int(tier) for tier in re.findall(r"\d+", told[1])) if told else (32768,),
        one_stage=int(one_stage[1]) if one_stage else rules.one_stage,
    )


def _source(files: Files, name: str) -> str:
    try:
        text = files.text(name) if files.has(name) else ""
        return "" if "\ufffd" in text else text
    except TableError:
        return ""
