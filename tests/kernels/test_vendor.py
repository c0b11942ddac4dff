"""The rows of other people's libraries say what they need in the same words, and run where they say."""

import pytest

import kernels
from kernels import platform
from kernels.op import Unsupported
from kernels.platform import LIBRARIES, Platform, detect, named
from kernels.vendor import Vendor, last_read, onednn_may_use
from tests.support.recorded import RECORDS
from tests.support.recorded_rows import CASES, TILELANG

ROWS = [i for op in kernels.OPS for i in kernels.implementations(op) if isinstance(i, Vendor)]


def test_rows_run_where_they_are_tried_and_plan_the_memory_that_is_recorded(snapshot):
    """Of the first case of each row: whole bytes of its layout, its workspace and its scratch."""
    planned: dict[tuple[str, str], str] = {}
    for case in (*CASES, *TILELANG):
        row, there = case.implementation, named(case.kind, case.arch)
        assert row.available(there).ok, case
        sizes = case.sizes(there)
        bytes_ = (row.layout(sizes), row.workspace(sizes), row.scratch(sizes))
        assert all(isinstance(b, int) and b >= 0 for b in bytes_), case
        planned.setdefault((case.op, row.name), f"{case.op} {row.name} {case}: {' '.join(map(str, bytes_))}")
    snapshot(RECORDS / "planned_memory.txt", "".join(f"{line}\n" for line in planned.values()))


ARCHS = [named("rocm", a) for a in ("gfx942", "gfx950")] + [
    named("cuda", a) for a in ("sm_90", "sm_100", "sm_103", "sm_120")
]


def test_where_rows_run_and_what_they_say_of_themselves(snapshot):
    names = (
        "library runtime boundaries activations truncates allocates captures shared_layout rebinds per_size "
        "any_fp8 instructions since others_since"
    )
    usual = {name: getattr(Vendor, name) for name in names.split()} | {"environment": {}}
    lines = []
    for row in (i for op in kernels.OPS for i in kernels.implementations(op)):
        runs = [place for place in ARCHS if row.available(place).ok]
        told = {name: getattr(row, name, value) for name, value in usual.items()}
        told["environment"] = row.environment(runs[0]) if runs else {}
        more = [f"{n}={value}" for n, value in told.items() if value != usual[n] and not callable(value)]
        lines.append(" ".join([f"{row.op} {row.name}:", *(place.arch for place in runs), *more]) + "\n")
    snapshot(RECORDS / "rows.txt", "".join(lines))


def test_a_row_says_how_to_get_its_library(monkeypatch):
    monkeypatch.setattr(platform, "version", lambda module: "99" if module in ("torch", "triton") else None)
    for row in ROWS:
        here = Platform(row.kinds[0], (*row.archs, "any")[0], features=frozenset(row.instructions))
        module = row.library or row.provider
        if module == "torch":
            assert row.available(here).ok
        elif not {*row.also} - {"triton"}:
            assert row.available(here).reason == f"{module} is not installed; {how_to_get(module)}"


def how_to_get(module: str) -> str:
    return LIBRARIES[module]["install"]


@pytest.mark.parametrize(("name", "kind", "arch", "absent", "reason"), [
    ("flashinfer.cudnn", "cuda", "sm_90", "cudnn", "cudnn is not installed; "),
    ("aiter.dispatch@sglang", "rocm", "gfx950", "sglang", "sglang is not installed; "),
    ("aiter.dispatch@sglang", "rocm", "gfx942", "sglang", ""),
])  # fmt: skip
def test_what_a_row_needs_beside_its_library_is_said(monkeypatch, name, kind, arch, absent, reason):
    monkeypatch.setattr(platform, "version", lambda module: None if module == absent else "1")
    (row,) = [row for row in ROWS if row.name == name]
    wanted = reason and reason + how_to_get(absent)
    assert row.available(Platform(kind, arch)).reason == wanted


@pytest.mark.parametrize(
    ("library", "version", "read"),
    [
        ("aiter", "0.1.20.post1", ""), ("aiter", "0.1.21.dev30+ge404860", "0.1.20.post1"),
        ("vllm", "0.33.0+cu130", ""), ("vllm", "0.34.0", "0.33.0"), ("deep_gemm", "0.2.6", "0.2.5"),
        ("deep_gemm", "2.5.0+c0ffee", ""), ("deep_gemm", "2.7.0", "2.6.1"), ("vllm", "unknown", ""),
        ("torch", "99", ""),
    ],
)  # fmt: skip
def test_which_release_was_read_last_where_one_is_newer(library, version, read):
    """SGLang counts its DeepGEMM by itself."""
    assert last_read(library, version) == read


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("ONEDNN_MAX_CPU_ISA", "DEFAULT", True), ("ONEDNN_MAX_CPU_ISA", "no such set", True),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", True), ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", True),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI", False), ("ONEDNN_MAX_CPU_ISA", "avx2", False),
        ("DNNL_MAX_CPU_ISA", "AVX2_VNNI_2", False),
    ],
)  # fmt: skip
def test_what_onednn_is_forbidden_is_asked_before_it_ends_the_process(monkeypatch, variable, value, allowed):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    here, there = detect("cpu"), named("cpu")
    rows = [row for row in ROWS if getattr(row, "onednn_isa", "") == "AVX512_CORE_BF16"]
    assert {row.op for row in rows} == set(kernels.OPS)
    before = [row.available(here) for row in rows]
    monkeypatch.setenv(variable, value)
    support = onednn_may_use("AVX512_CORE_BF16")
    assert support.ok == allowed and (allowed or f"{variable}={value.upper()} forbids" in support.reason)
    assert onednn_may_use("").ok
    assert onednn_may_use("AVX512_CORE").ok == (allowed or value == "AVX512_CORE_VNNI")
    for row, without in zip(rows, before, strict=True):
        assert row.available(here) == (support if without.ok else without)
        assert row.available(there).ok
        if not allowed:
            with pytest.raises(Unsupported, match=f"{variable}={value.upper()}"):
                row.require()


def test_the_newer_of_onednns_names_counts(monkeypatch):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    for newer in ("DEFAULT", ""):  # which is none
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", newer)
        assert onednn_may_use("AVX512_CORE").ok == bool(newer)
