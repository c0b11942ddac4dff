"""Known defects of libraries concern the sizes, versions and architectures that their issues tell of."""

import fnmatch
import re

import pytest

import kernels
from kernels import platform
from kernels.defects import DEFECTS, known_defects
from kernels.op import Implementation
from kernels.platform import named
from kernels.support import Support

GEMM, MOE, MLA = "block_scale_gemm", "fused_moe", "mla_decode"

FAULT = {"batch": 4, "ctx": "100", "heads": 64, "kv": "fp8"}


def row(op: str, name: str) -> Implementation:
    return next(i for i in kernels.implementations(op) if i.name == name)


def issues(monkeypatch, op: str, name: str, arch: str, version: str, **sizes: object) -> set[str]:
    monkeypatch.setattr(platform, "version", lambda module: version)
    read = kernels.OPS[op].sizes(sizes)
    return {defect.issue for defect in known_defects(row(op, name), read, arch)}


def gemm(m: int, n: int = 256, k: int = 256) -> dict[str, object]:
    return {"m": m, "n": n, "k": k}


def mla(**more: object) -> dict[str, object]:
    return {"batch": 4, "ctx": "100", "heads": 16, "kv": "fp8"} | more


MOE_SIZES: dict[str, object] = {"tokens": 8, "experts": 64, "topk": 4, "hidden": 512, "inter": 256}

AFFECTED = [
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "0.1.18", mla(heads=64)),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "0.1.21.dev46+ge4048607a", mla(heads=64)),
    ("ROCm/aiter#4076", MLA, "aiter.asm_persistent", "gfx942", "0.1.16.post2", mla()),
    ("ROCm/aiter#4076", MLA, "aiter.asm_persistent", "gfx950", "unknown", mla()),
    ("ROCm/aiter#4638", MLA, "aiter.asm_persistent", "gfx950", "0.1.19", mla()),
    ("ROCm/aiter#4638", MLA, "aiter.asm_persistent@sglang", "gfx950", "0.1.19", mla()),
    ("ROCm/aiter#4350", MLA, "aiter.asm", "gfx950", "0.1.19", mla(kv="bf16")),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "0.1.18", mla(heads=49)),
    ("ROCm/aiter#4964", MLA, "aiter.asm_persistent", "gfx950", "0.1.20", mla(heads=48, q=2)),
    ("ROCm/aiter#5679", MLA, "aiter.asm", "gfx942", "0.1.20", mla(kv="bf16", q=8)),
    ("ROCm/aiter#2720", MLA, "aiter.asm", "gfx950", "0.1.10", mla(kv="bf16", q=3)),
    ("ROCm/aiter#4711", MLA, "aiter.gluon", "gfx950", "0.1.20", mla(kv="bf16", q=2)),
    ("sgl-project/sglang#28685", GEMM, "aiter.ck_preshuffled", "gfx950", "0.1.10", gemm(1)),
    ("sgl-project/sglang#28685", GEMM, "aiter.dispatch_preshuffled", "gfx950", "0.1.10", gemm(1)),
    ("sgl-project/sglang#29918", GEMM, "aiter.ck", "gfx950", "0.1.10", gemm(4096, 2560, 4096)),
    ("sgl-project/sglang#29918", GEMM, "aiter.dispatch", "gfx950", "0.1.10", gemm(513)),
    ("flashinfer-ai/flashinfer#2356", MOE, "flashinfer.trtllm", "sm_100", "0.6.18", MOE_SIZES),
    ("sgl-project/sglang#32843", GEMM, "flashinfer.sm90", "sm_90", "0.7.0", gemm(32)),
    ("flashinfer-ai/flashinfer#4396", GEMM, "flashinfer.groupwise", "sm_103", "0.6.17", gemm(32)),
]
SOUND = [
    ("sgl-project/sglang#28685", GEMM, "aiter.triton_preshuffled", "gfx950", "0.1.10", gemm(1)),
    ("flashinfer-ai/flashinfer#4396", GEMM, "flashinfer.groupwise", "sm_100", "0.6.17", gemm(33)),
    ("flashinfer-ai/flashinfer#4396", GEMM, "flashinfer.groupwise", "sm_100", "0.6.1", gemm(32)),
    ("flashinfer-ai/flashinfer#4396", GEMM, "flashinfer.trtllm", "sm_100", "0.6.17", gemm(32)),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "0.1.17", mla(heads=64)),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "unknown", mla(heads=64)),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "0.1.18", mla(heads=32)),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "0.1.18", mla(heads=128)),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "0.1.18", mla(heads=64, kv="bf16")),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx950", "0.1.18", mla(heads=64)),
    ("ROCm/aiter#4957", MLA, "aiter.triton", "gfx942", "0.1.18", mla(heads=64)),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "0.1.18", mla(heads=64, q=2)),
    ("ROCm/aiter#4076", MLA, "aiter.asm_persistent", "gfx942", "0.1.16.post2", mla(q=2)),
    ("ROCm/aiter#4638", MLA, "aiter.asm_persistent", "gfx950", "0.1.19", mla(q=2)),
    ("ROCm/aiter#4957", MLA, "aiter.asm_persistent", "gfx942", "0.1.18", mla(heads=48)),
    ("ROCm/aiter#4964", MLA, "aiter.asm_persistent", "gfx950", "0.1.20", mla(heads=64, q=2)),
    ("ROCm/aiter#5679", MLA, "aiter.asm", "gfx942", "0.1.20", mla(kv="bf16", q=4)),
    ("ROCm/aiter#2720", MLA, "aiter.asm", "gfx950", "0.1.10", mla(kv="bf16", q=4)),
    ("ROCm/aiter#4711", MLA, "aiter.gluon", "gfx950", "0.1.20", mla(kv="bf16")),
    ("ROCm/aiter#4076", MLA, "aiter.asm_persistent", "gfx942", "0.1.16.post2", mla(batch=1)),
    ("ROCm/aiter#4076", MLA, "aiter.asm_persistent", "gfx942", "0.1.16.post2", mla(kv="bf16")),
    ("ROCm/aiter#4638", MLA, "aiter.asm_persistent", "gfx942", "0.1.19", mla()),
    ("ROCm/aiter#4638", MLA, "aiter.asm_persistent", "gfx950", "0.1.19", mla(heads=128)),
    ("ROCm/aiter#4350", MLA, "aiter.asm", "gfx942", "0.1.19", mla(kv="bf16")),
    ("sgl-project/sglang#28685", GEMM, "aiter.ck_preshuffled", "gfx942", "0.1.10", gemm(1)),
    ("sgl-project/sglang#28685", GEMM, "aiter.asm", "gfx950", "0.1.10", gemm(1)),
    ("sgl-project/sglang#29918", GEMM, "aiter.ck", "gfx950", "0.1.10", gemm(2048, 2560, 4096)),
    ("sgl-project/sglang#29918", GEMM, "aiter.dispatch", "gfx950", "0.1.10", gemm(512)),
    ("flashinfer-ai/flashinfer#2356", MOE, "flashinfer.trtllm", "sm_100", "0.5.3", MOE_SIZES),
    ("flashinfer-ai/flashinfer#2356", MOE, "flashinfer.cutlass", "sm_90", "0.6.18", MOE_SIZES),
    ("sgl-project/sglang#32843", GEMM, "flashinfer.sm90", "sm_90", "0.7.0", gemm(31)),
]


@pytest.mark.parametrize(("issue", "op", "name", "arch", "version", "sizes"), [*AFFECTED, *SOUND])
def test_what_an_issue_tells_of_is_known_and_no_more(monkeypatch, issue, op, name, arch, version, sizes):
    told = (issue, op, name, arch, version, sizes) in AFFECTED
    assert (issue in issues(monkeypatch, op, name, arch, version, **sizes)) == told


def test_every_entry_is_tried_and_names_rows_that_there_are():
    assert (
        {defect.issue for defect in DEFECTS} == {case[0] for case in AFFECTED} == {case[0] for case in SOUND}
    )
    for defect in DEFECTS:
        assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", defect.issue)
        names = [i.name for i in kernels.implementations(defect.op)]
        assert all(fnmatch.filter(names, pattern) for pattern in defect.rows), defect.rows


def test_a_case_that_faults_is_refused_with_the_number(monkeypatch):
    op, place = kernels.OPS[MLA], named("rocm", "gfx942")
    case = op.case({**op.defaults("gfx942"), **FAULT})
    reason = "known: ROCm/aiter#4957, GPU fault in mla_a8w8_qh64_qseqlen1_gqaratio64_v3_ps"
    for version, support in (("0.1.20", Support(False, reason)), ("0.1.17", Support(True))):
        monkeypatch.setattr(platform, "version", lambda module, version=version: version)
        assert row(MLA, "aiter.asm_persistent").supports(case, place) == support
