"""Suites of cases for all ops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT
from kernels import OPS
from shapes.attention import Parallel, mla_decode_sizes
from shapes.bins.tokens import token_bins
from shapes.experts import fused_moe_sizes, rows
from shapes.lengths import parse_span, spread
from shapes.models import model
from shapes.routing import Routing
from shapes.suites import OPS as CASES
from shapes.suites import suite, suites
from shapes.workloads import documented


def test_the_suites_by_name():
    served = [f"serving-3200-800-c{c}" for c in (1, 2, 4, 8, 16, 32, 64, 128)]
    served += [f"serving-3200-{osl}-c128" for osl in (1600, 3200, 6400)]
    served += [f"serving-3200-800-c{c}-mixed" for c in (4, 8, 16, 32, 64, 128)]
    served += [f"offline-3200-800-b{b}" for b in (32, 64, 128, 256, 512, 1024)]
    served += [f"offline-3200-{osl}-b{b}" for osl in (1600, 3200) for b in (256, 512, 1024)]
    served += [f"serving-{load}-c10800" for load in ("512-512", "1000-1000", "2000-2000", "2000-100")]
    assert list(suites()) == ["smoke", "r1-tp8", "r1-tp4", "r1-dp-ep8", *served]


SIZES = {
    "block_scale_gemm": ("m", "n", "k"),
    "fused_moe": ("tokens", "experts", "topk", "hidden", "inter", "ep", "shared", "routing"),
    "mla_decode": ("batch", "ctx", "heads", "page", "kv"),
    "mha_prefill": ("batch", "new", "prefix", "heads"),
}
TP8, R1 = Parallel(tp=8), model("deepseek-r1")


@pytest.mark.parametrize("op", SIZES)
def test_cases_are_weighted_named_different_and_read_unchanged(op):
    assert sorted(CASES) == sorted(SIZES) and suite("r1-tp8").cases("layer_norm") == []
    for name in suites():
        chosen = suite(name)
        assert chosen.name == name and "\n" not in chosen.description
        cases = chosen.cases(op)
        if op == "mha_prefill" and name.endswith("c10800"):
            assert cases == [], "its prompts are prefilled on other ranks"
            continue
        assert 1 <= len(cases) <= (8 if op == "mla_decode" else 80)
        assert sum(case.weight for case in cases) == pytest.approx(1)
        assert len({case.key for case in cases}) == len(cases)
        for case in cases:
            assert (case.op, case.boundary) == (op, "core")
            assert tuple(name for name in case.sizes if name != "dtype") == SIZES[op]
            assert case.place == "smoke" or case.place.startswith("deepseek-r1 ")
            # The op adds formats, which a suite leaves to the architecture.
            assert case.sizes.items() <= OPS[op].case(case.sizes).sizes.items()


def test_smoke_is_small():
    smoke = {op: [case.sizes for case in suite("smoke").cases(op)] for op in SIZES}
    for sizes in smoke["mla_decode"]:
        assert sum(spread(parse_span(sizes["ctx"]), sizes["batch"], 0)) * 576 < 200_000
    assert {sizes["page"] for sizes in smoke["mla_decode"]} == {1, 16, 64}
    gemms = smoke["block_scale_gemm"]
    assert all(s["m"] * s["n"] * s["k"] < 4e6 and s["k"] % 128 == 0 for s in gemms)
    assert any(s["n"] % 128 for s in gemms)
    moes = smoke["fused_moe"]
    assert all(s["tokens"] * s["topk"] * s["hidden"] * s["inter"] * 3 < 4e7 for s in moes)
    assert {s["ep"] for s in moes} == {1, 2} and {s["shared"] for s in moes} == {0, 1}
    for sizes in moes:
        names = ("tokens", "experts", "topk", "ep", "shared")
        routing = Routing(**{name: sizes[name] for name in names}, pattern=sizes["routing"])
        assert all(routing.picks(seed) != routing.picks(seed + 1) for seed in range(10))
    assert [sizes.get("dtype") for sizes in smoke["mha_prefill"]].count("fp8") == 1
    for sizes in smoke["mha_prefill"]:
        new, prefix = (parse_span(sizes[name], least=0) for name in ("new", "prefix"))
        assert 1 <= new[0] and new[1] + prefix[1] <= 150


@pytest.mark.parametrize(("name", "heads"), [("r1-tp8", 16), ("r1-tp4", 32)])
def test_the_sweep_has_each_concurrency_once_the_most_served_first(name, heads):
    cases, parallel = suite(name).cases("mla_decode"), Parallel(tp=int(name[-1]))
    assert [case.sizes["batch"] for case in cases] == [64, 128, 32, 16, 8, 4, 2, 1]
    for case in cases:
        assert (case.weight, case.place) == (1 / 8, f"deepseek-r1 {name[3:]} decode")
        assert case.sizes == mla_decode_sizes(R1, parallel, case.sizes["batch"], "3201..3999")
        assert case.sizes["heads"] == heads


def test_heads_batches_pages_and_cache_formats():
    cases = [case.sizes for case in suite("r1-dp-ep8").cases("mla_decode")]
    assert {sizes["heads"] for sizes in cases} == {128}, "DP attention has all heads"
    assert {sizes["batch"] for sizes in cases} == {128, 64, 32, 16}, "and a share of the requests"
    for name, chosen in suites().items():
        if name != "smoke":
            formats = {(case.sizes["page"], case.sizes["kv"]) for case in chosen.cases("mla_decode")}
            assert formats == {(64, "fp8" if name.endswith("c10800") else "bf16")}


def test_an_unknown_suite_is_one_line_that_names_the_suites():
    with pytest.raises(ValueError, match=r"^unknown suite 'r1'; suites: smoke, r1-tp8, ") as error:
        suite("r1")
    assert "\n" not in str(error.value)


def test_listing_suites_imports_no_library_and_simulates_nothing():
    code = (
        "import sys; from shapes.suites import suites;"
        "[(s.name, s.description) for s in suites().values()];"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'pandas', 'numpy', 'scipy', 'triton', 'pydantic', 'kernels', 'harness'}),"
        "'shapes.bins' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[] False"


def test_the_most_important_case_of_each_op_is_first():
    first = {op: suite("r1-tp8").cases(op)[0] for op in SIZES}
    assert {op: case.text for op, case in first.items()} == {
        "block_scale_gemm": "m=64 n=2112 k=7168",
        "fused_moe": "tokens=64 experts=256 topk=8 hidden=7168 inter=256 ep=1 shared=0 routing=uniform",
        "mla_decode": "batch=64 ctx=3201..3999 heads=16 page=64 kv=bf16",
        "mha_prefill": "batch=1 new=3200 prefix=0 heads=16",
    }
    assert first["block_scale_gemm"].place == "deepseek-r1 tp8 decode qkv_a"


def test_gemms_weigh_the_calls_of_their_layers():
    weights = {case.place: case.weight for case in suite("r1-tp8").cases("block_scale_gemm")}
    qkv_a, down = (weights[f"deepseek-r1 tp8 decode {name}"] for name in ("qkv_a", "dense down"))
    assert qkv_a / down == pytest.approx(61 / 3)
    assert not any(place.endswith("decode kv_b") for place in weights)
    assert "deepseek-r1 tp8 prefill kv_b" in weights


def test_mixed_steps_project_the_latents_of_prompt_tokens_alone():
    run = documented()["serving-3200-800-c64-mixed"]
    cases = suite("serving-3200-800-c64-mixed").cases("block_scale_gemm")
    tokens = {case.sizes["m"] for case in cases if case.place == "deepseek-r1 tp8 mixed qkv_a"}
    prompts = {case.sizes["m"] for case in cases if case.place == "deepseek-r1 tp8 mixed kv_b"}
    mixed = [bin_ for bin_ in token_bins(run.on_rank) if bin_.prompt]
    assert tokens == {bin_.tokens for bin_ in mixed}
    assert prompts == {bin_.prompt for bin_ in mixed}
    assert max(prompts) < max(tokens) <= 2048


@pytest.mark.parametrize(
    "name", ["serving-3200-800-c128", "serving-3200-800-c64-mixed", "serving-512-512-c10800"]
)
def test_served_cases_keep_the_tokens_of_the_bins(name):
    run = documented()[name]
    bins = token_bins(run.on_rank)
    mean = sum(bin_.weight * bin_.tokens for bin_ in bins)
    reach = 4 if run.parallel.ep == 8 else 1  # half of eight ranks' tokens
    moe = sum(case.weight * case.sizes["tokens"] for case in suite(name).cases("fused_moe"))
    assert moe == pytest.approx(mean * reach, rel=0.01)
    gemms = [case for case in suite(name).cases("block_scale_gemm") if case.place.endswith("qkv_a")]
    total = sum(case.weight for case in gemms)
    assert sum(case.weight * case.sizes["m"] for case in gemms) / total == pytest.approx(mean)


def test_expert_ranks_get_whole_experts_and_half_of_all_tokens():
    sizes = [case.sizes for case in suite("r1-dp-ep8").cases("fused_moe")]
    assert {(s["inter"], s["ep"]) for s in sizes} == {(2048, 8)}
    assert sizes[0]["tokens"] == pytest.approx(128 * 8 / 2, abs=2)
    tp4 = fused_moe_sizes(R1, Parallel(tp=4), 64)
    assert (tp4["inter"], tp4["ep"], rows(R1, TP8, 64)) == (512, 1, 64)
    with pytest.raises(ValueError, match=r"^tp=3 must divide the 2048 expert columns of deepseek-r1$"):
        fused_moe_sizes(R1, Parallel(tp=3), 64)


def test_cases_of_the_sweep_say_what_is_special():
    cases = suite("r1-tp8").cases("fused_moe")
    skewed = [case for case in cases if "zipf" in case.sizes["routing"]]
    assert skewed
    for case in skewed:
        skew = Routing(case.sizes["tokens"], 256, 8, pattern=case.sizes["routing"]).skew
        assert case.place.endswith(f", {case.sizes['routing']}, busiest expert {skew:.1f}x the mean")
    shared = [case for case in cases if case.sizes["shared"]]
    assert {case.sizes["tokens"] for case in shared} == {64, 16, 1, 3200}
    assert all(case.place.endswith(", shared expert fused") for case in shared)
    prompts = [case.sizes for case in suite("r1-tp8").cases("mha_prefill")]
    most = max(sizes["batch"] * int(sizes["new"]) for sizes in prompts)
    assert most <= 131_072 < most + 3200 + 1, "they fill SGLang's chunk budget"
    assert [(sizes["new"], sizes["prefix"]) for sizes in prompts[-2:]] == [("2048", "0"), ("1152", "2048")]


def test_all_that_suites_hold(snapshot):
    """In `suites.txt`; of the serving loads those of one concurrency, and of batches."""
    lines = []
    for name, it in suites().items():
        lines += ["", f"{name}: {it.description}; {it.per_case_s:g} s"]
        if "-c" in name and not name.endswith(("-c16", "-c16-mixed", "2000-100-c10800")):
            continue
        for op in CASES:
            lines += [f"{op} {case.weight:.4g} {case.text} [{case.place}]" for case in it.cases(op)]
    snapshot(Path(__file__).parent / "suites.txt", "\n".join(lines[1:]) + "\n")
