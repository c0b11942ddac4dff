"""Known defects of libraries, so that a report can name the reason for a wrong output or a fault.

Each entry names the issue or pull request on GitHub that describes it. Where that names no version in which
the defect is fixed, all later versions count as affected. None was seen by this suite: they are untested on
hardware.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

if TYPE_CHECKING:
    from kernels.op import Implementation


@dataclass(frozen=True)
class Defect:
    """A defect of a library."""

    issue: str
    """Where it is described: owner/repository#number."""
    symptom: str
    op: str
    rows: tuple[str, ...]
    """Shell patterns of the names of the implementations that have it."""
    archs: tuple[str, ...]
    versions: str = ""
    """The affected versions of the row's library, as PEP 440 specifiers. Empty for all versions, and for one
    that is not known."""
    when: Callable[[Any], bool] = lambda sizes: True
    """Whether it may occur at these sizes of the op."""
    refuse: bool = False
    """Whether the case must not run, because it harms more than the row, such as by a GPU fault."""

    def __str__(self) -> str:
        return f"known: {self.issue}, {self.symptom}"


def known_defects(row: Implementation, sizes: object, arch: str, version: str | None = None) -> list[Defect]:
    """The defects that may occur when an implementation runs at these sizes. Its library is not imported.

    version: the version of its library; None for the installed one
    """
    installed = row.version if version is None else version
    return [
        defect
        for defect in DEFECTS
        if defect.op == row.op
        and any(fnmatch.fnmatchcase(row.name, pattern) for pattern in defect.rows)
        and arch in defect.archs
        and defect.when(sizes)
        and (not defect.versions or _is_within(installed, defect.versions))
    ]


def _is_within(version: str, specifiers: str) -> bool:
    """Whether a version is among these. False where it is `unknown`, or empty for a library that is not
    installed."""
    try:
        return SpecifierSet(specifiers).contains(version, prereleases=True)
    except InvalidVersion:
        return False


# (n, k) -> the largest m at which CK's product was seen to be right with ROCm 7.0. For other n and k, the
# smallest of these m counts, as nothing is known (srt/layers/quantization/fp8_utils.py of SGLang 0.5.23).
_CK_RIGHT_UP_TO = {(2560, 4096): 2048, (4096, 1024): 4096, (4096, 2048): 2048, (4608, 4096): 512}

DEFECTS = (
    Defect(
        # Also ROCm/aiter#4363, with pages of one token, as the row calls it. AITER has the kernel since
        # 0.1.18 (hsa/gfx942/mla/ of its tags).
        issue="ROCm/aiter#4957",
        symptom="GPU fault in mla_a8w8_qh64_qseqlen1_gqaratio64_v3_ps",
        op="mla_decode",
        rows=("aiter.asm_persistent",),
        archs=("gfx942",),
        versions=">=0.1.18.dev0",
        when=lambda sizes: sizes.kv == "fp8" and 48 < sizes.heads <= 64 and sizes.q == 1,  # padded to 64
        refuse=True,
    ),
    Defect(
        issue="ROCm/aiter#4076",
        symptom="wrong with many sequences of one query token (seen in 0.1.16.post2)",
        op="mla_decode",
        rows=("aiter.asm_persistent",),
        archs=("gfx942", "gfx950"),
        when=lambda sizes: sizes.kv == "fp8" and sizes.batch > 1 and sizes.q == 1,
    ),
    Defect(
        issue="ROCm/aiter#4638",
        symptom="mla_a8w8_qh16_qseqlen1_gqaratio16_ps gives different answers to the same call",
        op="mla_decode",
        rows=("aiter.asm_persistent", "aiter.asm_persistent@sglang"),
        archs=("gfx950",),
        when=lambda sizes: sizes.kv == "fp8" and sizes.heads == 16 and sizes.q == 1,
    ),
    Defect(
        issue="ROCm/aiter#5679",
        symptom="wrong with 8 query tokens of 16 heads (2026-09)",
        op="mla_decode",
        rows=("aiter.asm",),
        archs=("gfx942",),
        when=lambda sizes: sizes.kv == "bf16" and sizes.heads == 16 and sizes.q > 4,
    ),
    Defect(
        issue="ROCm/aiter#2720",
        symptom="equal answers to all query tokens where their number is no power of two (seen in 0.1.10)",
        op="mla_decode",
        rows=("aiter.asm",),
        archs=("gfx950",),
        when=lambda sizes: sizes.q in (3, 5, 6, 7),
    ),
    Defect(
        issue="ROCm/aiter#4711",
        symptom="NaN where all keys of a split are masked",
        op="mla_decode",
        rows=("aiter.gluon",),
        archs=("gfx950",),
        when=lambda sizes: sizes.q > 1,
    ),
    Defect(
        issue="ROCm/aiter#4964",
        symptom="folds heads with the wrong places of sequences, seen with parallel contexts",
        op="mla_decode",
        rows=("aiter.asm_persistent",),
        archs=("gfx950",),
        when=lambda sizes: sizes.kv == "fp8" and sizes.q > 1 and -(-sizes.heads // 16) in (3, 5, 6, 7),
    ),
    Defect(
        issue="ROCm/aiter#4350",
        symptom="NaN in about half of the calls that split a sequence in 16 (seen at 95abba475)",
        op="mla_decode",
        rows=("aiter.asm",),
        archs=("gfx950",),
    ),
    Defect(
        # Also ROCm/aiter#3261 and sgl-project/sglang#23671; fixed by ROCm/rocm-libraries#8639.
        issue="sgl-project/sglang#28685",
        symptom="wrong rows, more of them at larger m, if ROCm 7.0 to 7.2 compiled CK's preshuffled product",
        op="block_scale_gemm",
        rows=("aiter.dispatch_preshuffled", "aiter.ck*_preshuffled"),
        archs=("gfx950",),
    ),
    Defect(
        issue="sgl-project/sglang#29918",
        symptom="NaN from CK's product above an m that depends on n and k, under ROCm before 7.2",
        op="block_scale_gemm",
        rows=("aiter.ck", "aiter.dispatch"),
        archs=("gfx950",),
        when=lambda sizes: sizes.m > _CK_RIGHT_UP_TO.get((sizes.n, sizes.k), min(_CK_RIGHT_UP_TO.values())),
    ),
    Defect(
        issue="flashinfer-ai/flashinfer#2356",
        symptom="loses accuracy where weights have scales near 1e-8",
        op="fused_moe",
        rows=("flashinfer.trtllm",),
        archs=("sm_100", "sm_103"),
        versions=">=0.6.0",
    ),
    Defect(
        issue="sgl-project/sglang#32843",
        symptom="for 32 tokens and more it runs another, less exact kernel",
        op="block_scale_gemm",
        rows=("flashinfer.sm90",),
        archs=("sm_90",),
        when=lambda sizes: sizes.m >= 32,
    ),
    Defect(
        # Also flashinfer-ai/flashinfer#3944 and #4409. The kernel for few tokens came with 0.6.2.
        issue="flashinfer-ai/flashinfer#4396",
        symptom="its kernel for up to 32 tokens sometimes reads a scale too early",
        op="block_scale_gemm",
        rows=("flashinfer.groupwise",),
        archs=("sm_100", "sm_103"),
        versions=">=0.6.2",
        when=lambda sizes: sizes.m <= 32,
    ),
)
