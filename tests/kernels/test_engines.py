"""What engines run by default: the data can be read, names rows that are there, and answers every case."""

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

import kernels
from kernels import engines
from kernels.conditions import RELATIONS
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
    "block_scale_gemm": {"m": (1, 16, 33, 4096), "n k": ((2112, 7168), (2624, 6144), (2688, 6144), (576,
     7168), (1536, 1536), (24576, 1536), (7168, 2048), (7168, 256), (4096, 512), (18432, 7168), (576, 1536),
     (2048, 2048)), "scales": ("fp32", "ue8m0")},
    "fused_moe": {"tokens": (1, 64, 4096), "experts hidden inter ep groups group_topk": ((256, 7168, 256, 1,
     8, 4), (384, 7168, 256, 1, 1, 1), (256, 6144, 256, 1, 1, 1), (256, 7168, 2048, 8, 8, 4), (384, 7168,
     2048, 8, 1, 1), (288, 7168, 2048, 32, 8, 4), (384, 7168, 256, 1, 8, 4)), "scales": ("fp32", "ue8m0"),
     "shared": (0, 1)},
    "mha_prefill": {"batch": (2,), "new": ("1024",), "prefix": ("0", "1024"), "heads": (4, 8, 12, 16, 20, 32,
     64, 128), "dtype": ("bf16", "fp8")},
    "mla_decode": {"batch": (16,), "ctx": ("4096",), "heads": (4, 8, 12, 16, 20, 32, 64, 96, 128), "kv": (
     "bf16", "fp8"), "page": (1, 16, 32, 48, 64, 128), "q": (1, 2, 4, 5, 8)},
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
        assert {relation for _, relation, _ in parts} <= RELATIONS.keys(), entry
        assert re.fullmatch(rf"{entry.engine}(/\w+)+\.py", entry.file) and entry.line > 0, entry
        assert re.fullmatch(r"\w+(\.\w+)?", entry.function), entry
        assert entry.why and not entry.why.endswith(".") and entry.archs, entry


def test_no_entry_is_out_of_reach():
    """One for all cases is the last of its flags on an architecture."""
    closed = set()
    for entry in ENTRIES:
        places = {(entry.engine, entry.op, arch, entry.flags) for arch in entry.archs}
        assert not places & closed, entry
        assert entry.fails == (not entry.row and "the server fails" in entry.why), entry
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


def with_flags() -> Iterator[tuple[str, ...]]:
    """(engine, architecture, op, case, flags, row) of each line of engine_flags.txt."""
    engine = ""
    for line in Path(__file__).with_name("engine_flags.txt").read_text().splitlines():
        said = line.partition("#")[0].strip()
        if said.startswith("["):
            engine = said.strip("[]")
        elif said:
            yield (engine, *(part.strip() for part in said.split("|")))


@pytest.mark.parametrize(("engine", "arch", "op", "case", "flags", "row"), list(with_flags()))
def test_what_flags_make_an_engine_run(engine, arch, op, case, flags, row):
    assert row_with(engine, op, arch, case, flags) == row


def test_a_flag_that_names_a_backend_stands_before_variables():
    """Where one of each is set, the flag decides; but for a flag that fails without its variable."""
    for (engine, arch), op in itertools.product(SERVED, GRID):
        lines = [line for line in engines.entries(engine, op, arch) if len(line.settings) == 1]
        flags = [line.flags.startswith("--") for line in lines if not line.flags.endswith("-backend aiter")]
        needing = [line for line in lines if line.flags.endswith("-backend aiter") and engine == "vllm"]
        assert flags == sorted(flags, reverse=True), (engine, op, arch)
        assert needing == lines[len(lines) - len(needing) :], (engine, op, arch)
