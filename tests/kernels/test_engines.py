"""What engines run by default: the data can be read, names rows that are there, and answers every case."""

import functools
import itertools
import re
from dataclasses import fields, replace

import pytest

import kernels
from kernels import engines
from kernels.engines import EngineDefault
from kernels.engines.deploy import settings
from kernels.platform import named
from shapes.case import parse
from shapes.suites import suite

ENTRIES = [entry for engine in engines.engines() for entry in engines.defaults(engine)]
SERVED = [(engine, arch) for engine in engines.engines() for arch in engines.archs(engine)]


@functools.cache
def rows(op: str) -> dict[str, kernels.Implementation]:
    return {implementation.name: implementation for implementation in kernels.implementations(op)}


def test_a_row_is_for_the_architectures_of_its_entry():
    for entry, arch in [(each, arch) for each in ENTRIES if each.row for arch in each.archs]:
        support = rows(entry.op)[entry.row].available(named(engines.kind(arch), arch))
        assert support.ok, (entry, support.reason)


@pytest.mark.parametrize("op", kernels.OPS)
def test_every_case_of_r1_has_an_answer(op):
    for case, (engine, arch) in itertools.product(suite("r1-tp8").cases(op), SERVED):
        whole = kernels.OPS[op].case({**kernels.OPS[op].defaults(arch), **case.sizes})
        assert engines.default(engine, op, arch, sizes_of(op, whole.sizes)), (engine, arch, whole.text)


GRID = {
    "block_scale_gemm": {
        "m": (1, 16, 33, 4096),
        "n k": (
            (2112, 7168), (2624, 6144), (2688, 6144), (576, 7168), (1536, 1536), (24576, 1536), (7168, 2048),
            (7168, 256), (4096, 512), (18432, 7168), (576, 1536), (2048, 2048),
        ),
        "scales": ("fp32", "ue8m0"),
    },
    "fused_moe": {
        "tokens": (1, 64, 4096),
        "experts hidden inter ep groups group_topk": (
            (256, 7168, 256, 1, 8, 4), (384, 7168, 256, 1, 1, 1), (256, 6144, 256, 1, 1, 1),
            (256, 7168, 2048, 8, 8, 4), (384, 7168, 2048, 8, 1, 1), (288, 7168, 2048, 32, 8, 4),
            (384, 7168, 256, 1, 8, 4),
        ),
        "scales": ("fp32", "ue8m0"), "shared": (0, 1),
    },
    "mha_prefill": {
        "batch": (2,), "new": ("1024",), "prefix": ("0", "1024"), "heads": (4, 8, 12, 16, 20, 32, 64, 128),
        "dtype": ("bf16", "fp8"),
    },
    "mla_decode": {
        "batch": (16,), "ctx": ("4096",), "heads": (4, 8, 12, 16, 20, 32, 64, 96, 128), "kv": ("bf16", "fp8"),
        "page": (1, 16, 32, 48, 64, 128), "q": (1, 2, 4, 5, 8),
    },
}  # fmt: skip
"""Of each op the values of sizes, or of several that go together: DeepSeek-R1's and Kimi K2's, and others."""


ODD = [
    ("block_scale_gemm", {"m": 1, "n": 100, "k": 7168}), ("block_scale_gemm", {"m": 64, "n": 2112, "k": 192}),
    ("fused_moe", {"tokens": 1, "experts": 257}), ("fused_moe", {"tokens": 1, "experts": 257, "ep": 257}),
    ("fused_moe", {"tokens": 1, "experts": 300}), ("fused_moe", {"tokens": 1, "topk": 9}),
    ("mha_prefill", {"batch": 2, "new": "64", "prefix": "0..60", "heads": 5}),
    ("mla_decode", {"batch": 2, "ctx": "100", "heads": 256}),
    ("mla_decode", {"batch": 2, "ctx": "1..99", "heads": 3}),
]  # fmt: skip
"""Of no model."""


@pytest.mark.parametrize("op", GRID)
def test_a_listed_row_takes_the_cases_of_its_line(op):
    """Where nothing is set each case has a line; with the flags of a line those that it is for."""
    for values in itertools.product(*GRID[op].values()):
        given = {}
        for names, value in zip(GRID[op], values, strict=True):
            given |= zip(names.split(), value, strict=True) if " " in names else {names: value}
        for engine, arch in SERVED:
            check_lines(engine, op, arch, given)


@pytest.mark.parametrize(("op", "given"), ODD)
def test_it_takes_what_no_model_has_where_nothing_is_set(op, given):
    for engine, arch in SERVED:
        check_lines(engine, op, arch, given, with_flags=False)


def check_lines(engine: str, op: str, arch: str, given: dict[str, object], with_flags: bool = True):
    lines = engines.entries(engine, op, arch)
    sizes = sizes_of(op, {**kernels.OPS[op].defaults(arch), **given})
    for flags in dict.fromkeys(["", *(line.flags for line in lines if with_flags)]):
        first = next((line for line in lines if line.flags == flags and line.holds(sizes)), None)
        assert first or flags, (engine, op, arch, given)
        if first and first.row:
            assert not refusal(op, first.row, arch, tuple(sizes.items())), (first, given)


@functools.cache
def refusal(op: str, row: str, arch: str, sizes: tuple[tuple[str, object], ...]) -> str:
    """Why a row takes the case in no boundary; empty: it takes it in one."""
    here, reason = named(engines.kind(arch), arch), ""
    for boundary in kernels.OPS[op].boundaries:
        support = rows(op)[row].supports(kernels.OPS[op].case(dict(sizes), boundary=boundary), here)
        if support.ok:
            return ""
        reason = support.reason
    return reason


def sizes_of(op: str, sizes: dict[str, object]) -> dict[str, object]:
    """With those that the case leaves to the op."""
    built = kernels.OPS[op].Sizes(**sizes)
    return {field.name: getattr(built, field.name) for field in fields(built)}


def test_an_entry_says_where_its_engine_decides_by_sizes_of_the_op():
    for entry in ENTRIES:
        sizes = {field.name for field in fields(kernels.OPS[entry.op].Sizes)}
        parts = [part.split() for one in entry.when for part in one.split(" and ")]
        assert {size for size, _, _ in parts} <= sizes | {"heads/tp"}, entry
        assert {relation for _, relation, _ in parts} <= engines.RELATIONS.keys(), entry
        assert re.fullmatch(rf"{entry.engine}(/\w+)+\.py", entry.file) and entry.line > 0, entry
        assert re.fullmatch(r"\w+(\.\w+)?", entry.function), entry
        assert entry.why and not entry.why.endswith(".") and entry.archs, entry


def test_no_entry_is_out_of_reach():
    """One for all cases is the last of its flags on an architecture."""
    closed = set()
    for entry in ENTRIES:
        places = {(entry.engine, entry.op, arch, entry.flags) for arch in entry.archs}
        assert not places & closed, entry
        closed |= places if not entry.when else set()


# the first that applies

MOST = EngineDefault("vllm", "1", "mla_decode", ("sm_90",), "a.b", "vllm/a.py", 1, "f", "why")


@pytest.mark.parametrize(
    ("when", "sizes", "wanted"),
    [
        ((), {}, True), (("m < 32",), {"m": 31}, True), (("m < 32",), {"m": 32}, False),
        (("m < 32",), {"m": "8"}, True), (("kv = fp8",), {"kv": "fp8"}, True),
        (("kv != fp8",), {"kv": "fp8"}, False), (("n = 2112 and k = 7168",), {"n": 2112, "k": 1}, False),
        (("n = 2112 and k = 7168", "k <= 1"), {"n": 2112, "k": 1}, True),
        (("prefix = 0",), {"prefix": "0..60"}, False), (("prefix = 0",), {"prefix": "0"}, True),
        (("page multiple-of 64",), {"page": 128}, True), (("page multiple-of 64",), {"page": 96}, False),
        (("ep > 1",), {"ep": 8}, True), (("heads >= 16",), {"heads": 8}, False),
        (("heads/tp = 16",), {"heads": 16}, True), (("heads/tp = 16",), {"heads": 128, "heads/tp": 16}, True),
        (("heads/tp = 16",), {"heads": 16, "heads/tp": 32}, False),
    ],
)  # fmt: skip
def test_a_condition_holds(when, sizes, wanted):
    assert replace(MOST, when=when).holds(sizes) is wanted


@pytest.mark.parametrize("text", ["", "m", "m <", "m ~ 3", "m < 3 or k = 2", "m < 3 and"])
def test_a_condition_that_cannot_be_read_is_said(text):
    with pytest.raises(ValueError, match="cannot read the condition"):
        replace(MOST, when=(text,)).holds({"m": 1})


def test_a_word_has_no_order():
    with pytest.raises(ValueError, match=r"size prefix=0\.\.60 cannot be ordered against 4"):
        replace(MOST, when=("prefix > 4",)).holds({"prefix": "0..60"})


@pytest.mark.parametrize(("engine", "arch", "given", "row"), [
    ("sglang", "gfx942", "heads=128 kv=fp8", ""),  # q stays bf16
    ("sglang", "gfx942", "heads=16 kv=fp8 q=4", "aiter.asm_persistent@sglang"),
    ("sglang", "gfx942", "heads=16 kv=fp8 q=5", ""),
    ("sglang", "gfx942", "heads=16 kv=bf16 q=8", "aiter.asm"),
    ("sglang", "gfx950", "heads=128 kv=fp8 q=8", "aiter.asm_persistent"),
    ("sglang", "gfx950", "heads=64 heads/tp=64 kv=bf16 q=4", "sglang.triton"),
    ("vllm", "gfx950", "heads=8 kv=bf16 q=2", "aiter.gluon"),
    ("vllm", "gfx942", "heads=8 kv=bf16 q=4", "aiter.asm_persistent"),
    ("vllm", "gfx942", "heads=8 kv=bf16 q=5", ""),
    ("vllm", "gfx942", "heads=16 kv=fp8 q=5", ""),
    ("vllm", "gfx942", "heads=128 kv=fp8 q=5", "aiter.asm_persistent"),
])  # fmt: skip
def test_what_verifies_drafts_on_amd(engine, arch, given, row):
    """As read in vLLM 0.33 (rocm_aiter_mla.py) and SGLang 0.5.23 (aiter_backend.py, triton_backend.py)."""
    words = parse(given)[0]
    sizes = {name: int(word) if word.isdecimal() else word for name, word in words.items()}
    flags = {"VLLM_ROCM_USE_AITER": "1", "kv-cache-memory-bytes": "120G"} if engine == "vllm" else {}
    whole = {"page": 64, "q": 1, "heads/tp": 16} | sizes
    assert engines.default(engine, "mla_decode", arch, whole, flags).row == row


def test_the_first_that_applies_holds_and_flags_are_not_set():
    small, large = ({"m": m, "n": 2112, "k": 7168} for m in (31, 32))
    assert engines.default("vllm", "block_scale_gemm", "sm_90", small).row == "flashinfer.sm90"
    assert engines.default("vllm", "block_scale_gemm", "sm_90", large).row == "deepgemm@vllm"
    assert engines.default("vllm", "block_scale_gemm", "gfx942", large).row == "vllm.triton"
    assert engines.default("vllm", "block_scale_gemm", "x86", large) is None
    # An entry whose flag is not set does not stand in for a case that no other takes.
    pages = {"kv": "fp8", "page": 16}
    entries = [each for each in engines.entries("vllm", "mla_decode", "sm_90") if each.holds(pages)]
    assert [(each.row, each.flags) for each in entries if "attention" not in each.flags] == [
        ("", ""), ("flashmla@vllm", ""), ("vllm.triton", "--block-size 16"),
    ]  # fmt: skip
    assert engines.default("vllm", "mla_decode", "sm_90", pages) is entries[0]


REST = {"mla_decode": {"batch": 16, "ctx": "4096"}, "fused_moe": {"tokens": 64}}
"""Sizes that decide nothing where a case does not give them."""


def row_with(engine: str, op: str, arch: str, case: str, flags: str = "") -> str:
    """What runs for a case, with flags as --with takes them."""
    words = {name: int(word) if word.isdecimal() else word for name, word in parse(case)[0].items()}
    words = REST.get(op, {}) | words
    over_tp = {name: words.pop(name) for name in ("heads/tp",) if name in words}
    sizes = sizes_of(op, {**kernels.OPS[op].defaults(arch), **words})
    return engines.default(engine, op, arch, sizes | over_tp, settings(flags.split())).row


GEMM, EXPERTS, DECODE, PREFILL = "block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill"
QKV_A, FEW = "m=64 n=2112 k=7168", "m=8 n=2112 k=7168"
TP8, EP8 = "inter=256 ep=1", "inter=2048 ep=8"
BF16, FP8 = "heads=16 kv=bf16", "heads=16 kv=fp8"
NEW, CACHED = "batch=2 new=1024 heads=16 prefix=0", "batch=2 new=1024 heads=16 prefix=1024"
MLA_PREFILL = "--attention-config.mla_prefill_backend"
QUANTISED = "--attention-config.use_prefill_query_quantization=true"
ON = "VLLM_ROCM_USE_AITER=1"
DECODE_OF_SGLANG, PREFILL_OF_SGLANG = "--decode-attention-backend", "--prefill-attention-backend"
NO_GRAPH = "--cuda-graph-backend-prefill=disabled"

OF_VLLM = [
    # linear layers
    ("sm_90", GEMM, FEW, "--linear-backend=deep_gemm", "deepgemm@vllm"),
    ("sm_90", GEMM, FEW, "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0", "deepgemm@vllm"),
    ("sm_90", GEMM, FEW, "--linear-backend=flashinfer_cutlass", "flashinfer.sm90"),  # the default
    ("sm_90", GEMM, QKV_A, "--linear-backend=flashinfer_trtllm", "deepgemm@vllm"),  # no such kernel
    ("sm_90", GEMM, QKV_A, "--linear-backend=torch", "cublaslt"),
    ("sm_90", GEMM, "m=64 n=2064 k=7168", "--linear-backend=deep_gemm", ""),
    ("sm_90", GEMM, QKV_A, "--linear-backend=deep_gemm VLLM_USE_DEEP_GEMM=0", ""),
    ("sm_90", GEMM, QKV_A, "--linear-backend=triton VLLM_USE_DEEP_GEMM=0", "vllm.triton"),
    ("sm_90", GEMM, QKV_A, "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0 VLLM_USE_DEEP_GEMM=0", "vllm.cutlass"),
    ("sm_100", GEMM, QKV_A + " scales=ue8m0", "--linear-backend=cutlass", "vllm.cutlass"),
    ("sm_103", GEMM, QKV_A, "--linear-backend=flashinfer_cutlass", ""),
    ("gfx942", GEMM, QKV_A, f"--linear-backend=triton {ON}", "vllm.triton"),
    ("gfx942", GEMM, QKV_A, f"{ON} VLLM_ROCM_USE_AITER_LINEAR=0", "vllm.triton"),
    ("gfx942", GEMM, QKV_A, f"{ON} VLLM_ROCM_USE_AITER_MOE=0", "aiter.dispatch"),
    ("gfx950", GEMM, QKV_A, f"--linear-backend=aiter {ON}", "aiter.triton"),
    ("gfx950", GEMM, QKV_A, "--linear-backend=aiter", ""),
    ("x86-amx", GEMM, QKV_A, "--linear-backend=triton", "vllm.amx"),
    # experts
    ("sm_90", EXPERTS, TP8, "--moe-backend=deep_gemm", "deepgemm@vllm"),
    ("sm_90", EXPERTS, TP8, "--moe-backend=flashinfer_cutlass", "flashinfer.cutlass"),
    ("sm_90", EXPERTS, TP8, "--moe-backend=cutlass", ""),
    ("sm_90", EXPERTS, TP8, "VLLM_USE_DEEP_GEMM=1", "deepgemm@vllm"),
    ("sm_90", EXPERTS, TP8, "VLLM_USE_DEEP_GEMM=0", "vllm.triton"),
    ("sm_90", EXPERTS, EP8, "--moe-backend=triton VLLM_USE_DEEP_GEMM=1", "vllm.triton"),
    ("sm_90", EXPERTS, EP8, "--moe-backend=deep_gemm VLLM_USE_DEEP_GEMM=0", ""),
    ("sm_100", EXPERTS, EP8 + " scales=ue8m0", "--moe-backend=deep_gemm", "deepgemm@vllm"),
    ("sm_100", EXPERTS, EP8 + " scales=fp32", "--moe-backend=deep_gemm", ""),
    ("sm_100", EXPERTS, TP8, "--moe-backend=flashinfer_cutlass", ""),
    ("sm_100", EXPERTS, TP8, "--moe-backend=flashinfer_trtllm", "flashinfer.trtllm"),
    ("gfx950", EXPERTS, TP8, f"--moe-backend=triton {ON}", "vllm.triton"),
    ("gfx950", EXPERTS, TP8, f"--moe-backend=aiter {ON}", "aiter.dispatch"),
    ("gfx950", EXPERTS, TP8, "--moe-backend=aiter", ""),
    ("gfx942", EXPERTS, TP8, f"{ON} VLLM_ROCM_USE_AITER_MOE=0", "vllm.triton"),
    ("gfx942", EXPERTS, TP8 + " shared=1", f"{ON} VLLM_ROCM_USE_AITER_MOE=0 "
     "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1", ""),
    ("gfx942", EXPERTS, TP8, f"{ON} VLLM_ROCM_USE_AITER_LINEAR=0", "aiter.dispatch"),
    # decode
    ("sm_90", DECODE, BF16 + " page=64", "--attention-backend=FLASHMLA", "flashmla@vllm"),
    ("sm_90", DECODE, BF16 + " page=16", "--attention-backend=FLASHMLA", ""),
    ("sm_90", DECODE, FP8 + " page=16", "--attention-backend=FLASHMLA --block-size=16", ""),
    ("sm_90", DECODE, BF16 + " page=64", "--attention-backend=FLASH_ATTN_MLA", "flash_attn.fa3@vllm"),
    ("sm_90", DECODE, FP8 + " page=64", "--attention-backend=FLASH_ATTN_MLA", ""),
    ("sm_90", DECODE, BF16 + " page=64", "--attention-backend=FLASHINFER_MLA", ""),
    ("sm_90", DECODE, BF16 + " page=48", "--attention-backend=TRITON_MLA", "vllm.triton"),
    ("sm_90", DECODE, BF16 + " page=64", "--attention-config.flash_attn_version=4", ""),
    ("sm_100", DECODE, BF16 + " page=128", "--attention-backend=CUTLASS_MLA", "vllm.cutlass_mla"),
    ("sm_100", DECODE, BF16 + " page=64", "--attention-backend=CUTLASS_MLA", ""),
    ("sm_100", DECODE, BF16 + " page=128 q=2", "--attention-backend=CUTLASS_MLA", ""),
    ("sm_100", DECODE, FP8 + " page=128", "--attention-backend=CUTLASS_MLA", ""),
    ("sm_103", DECODE, FP8 + " page=32", "--attention-backend=TOKENSPEED_MLA", "tokenspeed_mla"),
    ("sm_103", DECODE, BF16 + " page=32", "--attention-backend=TOKENSPEED_MLA", ""),
    ("sm_103", DECODE, FP8 + " page=64", "--attention-backend=FLASHINFER_MLA", "flashinfer.auto"),
    ("sm_103", DECODE, FP8 + " page=64", "--attention-backend=FLASHMLA", ""),
    ("gfx942", DECODE, FP8 + " page=64", "--attention-backend=ROCM_AITER_MLA", "aiter.asm_persistent"),
    ("gfx942", DECODE, FP8 + " page=64", f"--attention-backend=TRITON_MLA {ON}", "vllm.triton"),
    ("gfx942", DECODE, FP8 + " page=1", f"--attention-backend=TRITON_MLA {ON}", ""),
    ("gfx942", DECODE, FP8 + " page=64", f"{ON} VLLM_ROCM_USE_AITER_MLA=0", "vllm.triton"),
    ("gfx942", DECODE, FP8 + " page=64", f"{ON} VLLM_ROCM_USE_AITER_MHA=0", "aiter.asm_persistent"),
    ("gfx942", DECODE, FP8 + " page=64", f"{ON} VLLM_ROCM_USE_AITER_MLA=0 --attention-backend=ROCM_AITER_MLA",
     "aiter.asm_persistent"),
    ("gfx942", DECODE, BF16 + " page=64 q=5", "--attention-backend=ROCM_AITER_MLA", ""),
    # the cache of one layer small enough for Gluon's kernel
    ("gfx950", DECODE, "heads=8 kv=bf16", f"{ON} --kv-cache-memory-bytes=120G", "aiter.gluon"),
    ("gfx950", DECODE, "heads=8 kv=bf16", "--attention-backend=ROCM_AITER_MLA --kv-cache-memory-bytes=120G",
     "aiter.gluon"),
    ("gfx950", DECODE, "heads=8 kv=bf16", f"--attention-backend=TRITON_MLA {ON} --kv-cache-memory-bytes=120G",
     "vllm.triton"),
    ("gfx950", DECODE, "heads=8 kv=bf16", f"{ON} VLLM_ROCM_USE_AITER_MLA=0 --kv-cache-memory-bytes=120G",
     "vllm.triton"),
    ("gfx950", DECODE, "heads=8 kv=bf16", f"{ON} VLLM_ROCM_AITER_MLA_ASM_PADDING=asm "
     "--kv-cache-memory-bytes=120G", "aiter.asm_persistent"),
    ("gfx950", DECODE, "heads=8 kv=bf16 q=5", f"{ON} VLLM_ROCM_AITER_MLA_ASM_PADDING=asm", ""),
    ("gfx950", DECODE, "heads=8 kv=bf16", f"{ON} VLLM_ROCM_AITER_MLA_ASM_PADDING=asm "
     "--attention-backend=TRITON_MLA", "vllm.triton"),
    ("x86-amx", DECODE, BF16 + " page=16", "--attention-backend=CPU_MLA", "vllm.vec"),
    ("x86-amx", DECODE, BF16 + " page=32", "--attention-backend=TRITON_MLA", "vllm.amx"),
    ("x86-avx512", DECODE, BF16 + " page=16", "--attention-backend=AMX_MLA", "vllm.vec"),
    # prefill
    ("sm_90", PREFILL, NEW, "--attention-config.flash_attn_version=4", "flash_attn.fa4@vllm"),
    ("sm_90", PREFILL, NEW, "--attention-backend=TRITON_MLA", "flash_attn.fa3@vllm"),
    ("sm_100", PREFILL, CACHED, f"{MLA_PREFILL}=TRTLLM_RAGGED", "flashinfer.trtllm"),
    ("sm_100", PREFILL, NEW, f"{MLA_PREFILL}=FLASHINFER", "flashinfer.cutlass"),
    ("sm_100", PREFILL, NEW, f"{MLA_PREFILL}=TOKENSPEED_MLA", ""),
    ("sm_100", PREFILL, NEW + " dtype=fp8", f"{MLA_PREFILL}=TRTLLM_RAGGED", ""),
    ("sm_100", PREFILL, NEW + " dtype=fp8", f"{MLA_PREFILL}=TRTLLM_RAGGED {QUANTISED}", "flashinfer.trtllm"),
    ("sm_100", PREFILL, NEW + " dtype=fp8", QUANTISED, ""),  # FlashAttention keeps bf16
    ("gfx942", PREFILL, NEW, f"{MLA_PREFILL}=FLASH_ATTN {ON}", ""),
    ("gfx942", PREFILL, NEW, f"{ON} VLLM_ROCM_USE_AITER_MHA=0", "aiter.dispatch"),
    ("gfx950", PREFILL, NEW, f"--attention-backend=TRITON_MLA {ON}", "aiter.dispatch"),
    ("gfx950", PREFILL, NEW + " dtype=fp8", f"--attention-backend=TRITON_MLA {ON}", ""),
    ("gfx950", PREFILL, NEW + " dtype=fp8", f"{ON} VLLM_ROCM_USE_AITER_MLA=0", ""),
    ("gfx950", PREFILL, NEW + " dtype=fp8", "--attention-backend=ROCM_AITER_MLA", "aiter.fp8_ps"),
    ("x86-amx", PREFILL, NEW, "", ""),  # absorbed
    ("x86-amx", PREFILL, NEW, "--attention-backend=CPU_MLA", "vllm.dense"),
]  # fmt: skip

OF_SGLANG = [
    # linear layers
    ("sm_90", GEMM, FEW, "--fp8-gemm-backend=flashinfer_deepgemm", "flashinfer.sm90"),
    ("sm_90", GEMM, QKV_A, "--fp8-gemm-backend=flashinfer_deepgemm", "deepgemm"),
    ("sm_90", GEMM, "m=8 n=576 k=192", "--fp8-gemm-backend=flashinfer_deepgemm", "sglang.triton"),
    ("sm_90", GEMM, QKV_A, "--fp8-gemm-backend=flashinfer_deepgemm SGLANG_ENABLE_JIT_DEEPGEMM=0",
     "sglang.triton"),
    ("sm_90", GEMM, QKV_A, "SGLANG_ENABLE_JIT_DEEPGEMM=0", "sglang.triton"),
    ("sm_90", GEMM, QKV_A, "--fp8-gemm-backend=deep_gemm SGLANG_ENABLE_JIT_DEEPGEMM=0", ""),
    ("sm_90", GEMM, QKV_A, "--fp8-gemm-backend=cutlass", ""),
    ("sm_100", GEMM, QKV_A + " scales=fp32", "--fp8-gemm-backend=flashinfer_trtllm", "flashinfer.trtllm"),
    ("sm_100", GEMM, "m=8 n=7168 k=128 scales=fp32", "--fp8-gemm-backend=flashinfer_trtllm", "sglang.triton"),
    ("sm_100", GEMM, "m=64 n=7168 k=2048", "--fp8-gemm-backend=flashinfer_cutlass", ""),
    ("sm_100", GEMM, QKV_A, "--fp8-gemm-backend=triton SGLANG_ENABLE_JIT_DEEPGEMM=0", "sglang.triton"),
    ("gfx942", GEMM, FEW, "--fp8-gemm-backend=triton SGLANG_AITER_GFX942_BLOCKSCALE_USE_CK=1",
     "sglang.triton"),
    ("gfx942", GEMM, QKV_A, "SGLANG_USE_AITER=0 SGLANG_AITER_GFX942_BLOCKSCALE_USE_CK=1", "sglang.triton"),
    ("gfx950", GEMM, QKV_A, "--fp8-gemm-backend=aiter", "aiter.triton"),
    ("gfx950", GEMM, QKV_A, "--fp8-gemm-backend=aiter SGLANG_USE_AITER=0", ""),
    # experts
    ("sm_90", EXPERTS, TP8 + " shared=1", "--moe-runner-backend=deep_gemm", "deepgemm@sglang"),
    ("sm_90", EXPERTS, EP8 + " shared=1", "--moe-runner-backend=deep_gemm", ""),
    ("sm_90", EXPERTS, EP8, "--moe-runner-backend=triton --moe-a2a-backend=deepep", ""),
    ("sm_90", EXPERTS, EP8, "--moe-runner-backend=deep_gemm --moe-a2a-backend=deepep", "deepgemm@sglang"),
    ("sm_100", EXPERTS, EP8, "--moe-runner-backend=flashinfer_trtllm --moe-a2a-backend=deepep", ""),
    ("sm_90", EXPERTS, TP8, "--moe-runner-backend=cutlass", ""),
    ("sm_90", EXPERTS, TP8, "--moe-runner-backend=flashinfer_cutlass", "sglang.triton"),
    ("sm_100", EXPERTS, TP8 + " shared=1", "--moe-runner-backend=triton", "sglang.triton"),
    ("sm_100", EXPERTS, TP8 + " scales=fp32", "--moe-runner-backend=deep_gemm", ""),
    ("sm_100", EXPERTS, TP8, "--moe-runner-backend=flashinfer_trtllm_routed",
     "flashinfer.trtllm_routed@sglang"),
    ("sm_100", EXPERTS, TP8 + " shared=1", "--moe-runner-backend=flashinfer_trtllm_routed", ""),
    ("gfx950", EXPERTS, EP8 + " shared=1", "--moe-runner-backend=triton", "sglang.triton"),
    ("gfx950", EXPERTS, "experts=384 groups=1 group_topk=1 shared=1", "SGLANG_USE_AITER=0", ""),
    # decode
    ("sm_90", DECODE, FP8 + " page=64", f"{DECODE_OF_SGLANG}=flashmla", "flashmla"),
    ("sm_90", DECODE, FP8 + " page=1", f"{DECODE_OF_SGLANG}=flashmla", ""),
    ("sm_90", DECODE, BF16 + " page=1", f"{DECODE_OF_SGLANG}=flashinfer", "flashinfer.fa3"),
    ("sm_90", DECODE, BF16 + " page=64", f"{DECODE_OF_SGLANG}=flashinfer", ""),
    ("sm_90", DECODE, FP8 + " page=1", f"{DECODE_OF_SGLANG}=flashinfer", ""),
    ("sm_90", DECODE, BF16 + " page=1", f"{PREFILL_OF_SGLANG}=flashinfer", "flash_attn.fa3@sglang"),
    ("sm_90", DECODE, FP8 + " page=1", f"{DECODE_OF_SGLANG}=triton", "sglang.triton"),
    ("sm_100", DECODE, FP8 + " page=64", f"{DECODE_OF_SGLANG}=cutedsl_mla", "flashinfer.cute_dsl"),
    ("sm_100", DECODE, "heads=96 kv=fp8 page=64", f"{DECODE_OF_SGLANG}=cutedsl_mla", "flashinfer.cute_dsl"),
    ("sm_100", DECODE, "heads=96 kv=fp8 page=64", f"{DECODE_OF_SGLANG}=trtllm_mla", ""),
    ("sm_100", DECODE, BF16 + " page=1", f"{DECODE_OF_SGLANG}=flashinfer", "flashinfer.fa2"),
    ("sm_100", DECODE, BF16 + " page=64", f"{DECODE_OF_SGLANG}=fa4", "flash_attn.fa4"),
    ("sm_100", DECODE, FP8 + " page=64", f"{DECODE_OF_SGLANG}=fa4", ""),
    ("sm_100", DECODE, BF16 + " page=1", f"{PREFILL_OF_SGLANG}=fa4", "flashinfer.fa2"),
    ("sm_100", DECODE, BF16 + " page=64", f"{PREFILL_OF_SGLANG}=fa4 {DECODE_OF_SGLANG}=trtllm_mla",
     "flashinfer.trtllm"),
    ("gfx942", DECODE, BF16, f"{DECODE_OF_SGLANG}=triton SGLANG_AITER_MLA_PERSIST=0", "sglang.triton"),
    ("gfx942", DECODE, "heads=64 heads/tp=64 kv=bf16", f"{DECODE_OF_SGLANG}=aiter", "aiter.asm_persistent"),
    ("gfx942", DECODE, "heads=64 heads/tp=64 kv=fp8", f"{DECODE_OF_SGLANG}=aiter", ""),
    ("gfx950", DECODE, "heads=8 heads/tp=8 kv=bf16", f"{DECODE_OF_SGLANG}=aiter", ""),
    ("gfx950", DECODE, FP8, "SGLANG_AITER_MLA_PERSIST=0", "aiter.asm"),
    ("gfx950", DECODE, FP8, f"{DECODE_OF_SGLANG}=aiter SGLANG_AITER_MLA_PERSIST=0", "aiter.asm"),
    ("gfx950", DECODE, FP8, "SGLANG_AITER_MLA_AUTO_KV_SPLITS=1", "aiter.asm_persistent"),
    ("gfx950", DECODE, FP8, "SGLANG_AITER_MLA_AUTO_KV_SPLITS=1 SGLANG_AITER_MLA_PERSIST=0", "aiter.asm"),
    ("gfx942", DECODE, FP8, "SGLANG_AITER_MLA_AUTO_KV_SPLITS=1", ""),
    ("gfx950", DECODE, FP8, "SGLANG_AITER_MLA_DECODE_BACKEND=gluon", "aiter.asm_persistent@sglang"),
    ("gfx942", DECODE, FP8, "SGLANG_AITER_MLA_PERSIST=0", ""),
    # prefill
    ("sm_90", PREFILL, NEW, f"{PREFILL_OF_SGLANG}=flashinfer", ""),
    ("sm_90", PREFILL, NEW, f"{PREFILL_OF_SGLANG}=flashinfer {NO_GRAPH}", "flashinfer.fa3"),
    ("sm_90", PREFILL, NEW, f"{PREFILL_OF_SGLANG}=fa4 {NO_GRAPH}", "flash_attn.fa4"),
    ("sm_90", PREFILL, NEW, f"{DECODE_OF_SGLANG}=flashmla {NO_GRAPH}", "flash_attn.fa3@sglang"),
    ("sm_100", PREFILL, NEW, f"{DECODE_OF_SGLANG}=cutedsl_mla", "flashinfer.trtllm"),
    ("sm_100", PREFILL, NEW, f"{DECODE_OF_SGLANG}=fa4", ""),
    ("sm_100", PREFILL, NEW, f"{DECODE_OF_SGLANG}=trtllm_mla {NO_GRAPH}", "flashinfer.cutlass"),
    ("sm_100", PREFILL, NEW, f"{DECODE_OF_SGLANG}=fa4 {PREFILL_OF_SGLANG}=trtllm_mla", "flashinfer.trtllm"),
    ("sm_100", PREFILL, NEW, f"{DECODE_OF_SGLANG}=fa4 {PREFILL_OF_SGLANG}=trtllm_mla {NO_GRAPH}",
     "flashinfer.trtllm"),
    ("sm_100", PREFILL, NEW, f"{PREFILL_OF_SGLANG}=fa4 {NO_GRAPH}", "flash_attn.fa4"),
    ("sm_100", PREFILL, NEW + " dtype=fp8", f"{PREFILL_OF_SGLANG}=fa4 {NO_GRAPH}", ""),
    ("gfx942", PREFILL, NEW + " heads/tp=16", f"{PREFILL_OF_SGLANG}=triton", "sglang.triton_extend"),
    ("gfx942", PREFILL, CACHED + " heads/tp=16", f"{PREFILL_OF_SGLANG}=triton", ""),
    ("gfx942", PREFILL, "batch=2 new=8 heads=32 heads/tp=32", f"{PREFILL_OF_SGLANG}=aiter", "aiter.dispatch"),
    ("gfx950", PREFILL, "batch=2 new=8 heads=32 heads/tp=32 dtype=fp8", f"{PREFILL_OF_SGLANG}=aiter",
     "aiter.fp8_ps"),
    ("gfx950", PREFILL, NEW, "SGLANG_AITER_FP8_PREFILL_ATTN=0", "aiter.dispatch"),
    ("gfx950", PREFILL, NEW + " dtype=fp8", "SGLANG_AITER_FP8_PREFILL_ATTN=0", ""),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "op", "case", "flags", "row"), OF_VLLM)
def test_what_flags_make_vllm_run(arch, op, case, flags, row):
    """As read in vLLM 0.33.0. Flags that change nothing leave the row as it is."""
    assert row_with("vllm", op, arch, case, flags) == row


@pytest.mark.parametrize(("arch", "op", "case", "flags", "row"), OF_SGLANG)
def test_what_flags_make_sglang_run(arch, op, case, flags, row):
    """As read in SGLang 0.5.23."""
    assert row_with("sglang", op, arch, case, flags) == row


def test_a_flag_that_names_a_backend_stands_before_variables():
    """Where one of each is set, the flag decides; but for a flag that fails without its variable."""
    for (engine, arch), op in itertools.product(SERVED, GRID):
        lines = [line for line in engines.entries(engine, op, arch) if len(line.settings) == 1]
        flags = [line.flags.startswith("--") for line in lines if not line.flags.endswith("-backend aiter")]
        needing = [line for line in lines if line.flags.endswith("-backend aiter") and engine == "vllm"]
        assert flags == sorted(flags, reverse=True), (engine, op, arch)
        assert needing == lines[len(lines) - len(needing) :], (engine, op, arch)
