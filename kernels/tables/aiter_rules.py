"""How a release of AITER looks up its tables. The rules are read from its source."""

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
"""The rules as JSON, in the recorded extracts, which have no source."""

FORMATS = {"gfx942": "torch.float8_e4m3fnuz", "gfx950": "torch.float8_e4m3fn"}
"""FP8 formats by architecture (`aiter/utility/dtypes.py`). All others have e4m3fn."""


@dataclass(frozen=True)
class Rules:
    """What differs between releases. The defaults are those of commit e404860."""

    merges: bool = True
    """The files of model_configs/ are merged with the default file (`aiter/jit/core.py`)."""
    duplicates_raise: bool = True
    """Rows with equal keys make a merge raise. Otherwise the fastest row is kept."""
    infers_gfx: bool = True
    """A merge takes a missing gfx from cu_num."""
    moe_gfx: bool = True
    """The key of tuned_fmoe begins with gfx (`aiter/fused_moe.py` `get_2stage_cfgs`)."""
    moe_strips: bool = True
    """With an expert mask, topk in the key is one less than the columns of topk_ids."""
    moe_act: str = "blind"
    """How act_type is compared: `exact`, `blind` (not at all), or `exact, then blind`."""
    moe_empty_tag: bool = False
    """Only rows with an empty _tag count. Otherwise all count except those of `flydsl_fallback`."""
    moe_tiers: tuple[int, ...] = (32768, 131072)
    """From the first of these on, tokens are rounded down to one of these in the key. Below, they are rounded
    up to a power of two."""
    one_stage: int = 128
    """After a miss, the 1-stage kernel runs only if inter_dim is a multiple of this."""
    bounds: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    """The M of the buckets M_LEQ_ and M_GEQ_ (`aiter/ops/triton/utils/gemm_config_utils.py`)."""
    nested: bool = True
    """Triton configurations are looked for in ARCH/BACKEND/gemm/TYPE/ first."""
    backends: bool = True
    """Triton configurations are looked for in gemm/BACKEND/ before gemm/."""
    assumed: str = ""
    """What could not be read from the source; empty where all could."""

    def keeps_tag(self, tag: str) -> bool:
        return tag == "" if self.moe_empty_tag else tag != "flydsl_fallback"

    def topk(self, columns: int, mask: bool) -> int:
        """topk in the key of MoE. columns: those of topk_ids; mask: whether an expert mask is passed."""
        return columns - 1 if mask and self.moe_strips else columns

    def token(self, tokens: int) -> int:
        """The number of tokens in the key of MoE, as `get_padded_M` of `aiter/fused_moe.py` returns it."""
        if tokens < self.moe_tiers[0]:
            return power_of_two(tokens)
        return max(tier for tier in self.moe_tiers if tokens >= tier)


def fp8_of(arch: str) -> str:
    return FORMATS.get(arch, "torch.float8_e4m3fn")


def padded(m: int, n: int) -> list[int]:
    """The M for which a GEMM is looked up, in order: m, then two paddings of it (`getPaddedM` of
    csrc/py_itfs_cu/gemm_common.cu)."""
    step = next((step for most, step in ((256, 16), (1024, 32), (4096, 64)) if m <= most), 128)
    coarse = 8192 if m > 8192 and n > 4096 else power_of_two(m)
    return list(dict.fromkeys((m, -(-m // step) * step, coarse)))


def power_of_two(m: int) -> int:
    """The smallest power of two that is at least m."""
    return 1 << max(m - 1, 0).bit_length()


def read_rules(files: Files) -> Rules:
    """The rules of a checkout or wheel, or the recorded ones, or else those of the newest release."""
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
    act = "exact"
    if "_ACT_TYPE_DISABLED_KEY" in moe:
        act = "exact, then blind" if keys and "str(activation)" in keys[1] else "blind"
    return dataclasses.replace(
        rules,
        moe_gfx=bool(re.search(r'_INDEX_COLS = \[\s*"gfx"', moe)),
        moe_strips="topk -= int(is_ep)" in moe,
        moe_act=act,
        moe_empty_tag='df["_tag"].fillna("") == ""' in moe,
        moe_tiers=tuple(int(tier) for tier in re.findall(r"\d+", told[1])) if told else (32768,),
        one_stage=int(one_stage[1]) if one_stage else rules.one_stage,
    )


def _source(files: Files, name: str) -> str:
    """The text of a file; empty where it is missing or cannot be read."""
    try:
        text = files.text(name) if files.has(name) else ""
        return "" if "\ufffd" in text else text
    except TableError:
        return ""
