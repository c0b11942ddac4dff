"""Suites of cases for all ops."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from harness.errors import UsageError
from harness.paths import ROOT
from harness.plan.select import choose_cases
from kernels import OPS
from shapes.attention import Parallel
from shapes.bins import token_bins
from shapes.experts import fused_moe_sizes, rows_on_rank
from shapes.lengths import parse_span, span_text
from shapes.models import model
from shapes.suites import CASE_MODULES as CASES
from shapes.suites import ragged, suite, suites
from shapes.workloads import documented

SIZES = {
    "block_scale_gemm": ("m", "n", "k"),
    "fused_moe": ("tokens", "experts", "topk", "hidden", "inter", "ep", "shared", "routing"),
    "mla_decode": ("batch", "ctx", "heads", "page", "kv"),
    "mha_prefill": ("batch", "new", "prefix", "heads"),
}
UNSAID = ("dtype", "groups", "group_topk", "model_len", "q")
"""Sizes that only some cases say."""
WHOLE = ("serving-3200-800-c64-mixed", "serving-512-512-c10800")
TP8, R1 = Parallel(tp=8), model("deepseek-r1")


@pytest.mark.parametrize("op", SIZES)
def test_cases_are_weighted_named_different_and_read_unchanged(op):
    assert sorted(CASES) == sorted(SIZES) and suite("r1-tp8").cases("layer_norm") == []
    for name in suites():
        chosen = suite(name)
        assert chosen.name == name and "\n" not in chosen.description
        cases = chosen.cases(op)
        if (op, name) == ("mla_decode", "v32-tp8") or (op == "mha_prefill" and name.endswith("c10800")):
            assert cases == [], "its attention is sparse, or its prompts are prefilled on other ranks"
            continue
        assert 1 <= len(cases) <= (8 if op == "mla_decode" else 100)
        assert sum(case.weight for case in cases) == pytest.approx(1)
        assert len({case.key for case in cases}) == len(cases)
        for case in cases:
            assert (case.op, case.boundary) == (op, "core")
            assert tuple(name for name in case.sizes if name not in UNSAID) == SIZES[op]
            assert case.place == "smoke" or case.place.startswith(("deepseek-", "kimi-k2 "))
            # The op adds formats, which a suite leaves to the architecture.
            assert case.sizes.items() <= OPS[op].case(case.sizes).sizes.items()


def test_the_cases_of_suites(snapshot):
    """All general suites and two of the documented ones whole; of the others the first case of each op."""
    lines = [f"{name}: {it.description}; {it.per_case_s:g} s a case\n" for name, it in suites().items()]
    for name, op in itertools.product(suites(), SIZES):
        follows = name.startswith(("serving", "offline", "k2", "v32")) and name not in WHOLE
        for case in suite(name).cases(op)[: 1 if follows else None]:
            lines.append(f"{name}: {case.text}, {case.weight:.6g}, {case.place}\n")
    lines += [f"ragged: {case.text}\n" for op in SIZES for case in ragged(op)]
    snapshot(ROOT / "tests/shapes/cases_of_suites.txt", "".join(lines))


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


def test_ranks_get_a_share_of_columns_and_whole_experts():
    tp4 = fused_moe_sizes(R1, Parallel(tp=4), 64)
    assert (tp4["inter"], tp4["ep"], rows_on_rank(R1, TP8, 64)) == (512, 1, 64)
    of_half = [rows_on_rank(R1, Parallel(tp=16, ep=8), tokens) for tokens in (1, 11)]
    assert of_half == [1, 3], "half of 0.5, of 5.5"
    assert fused_moe_sizes(R1, Parallel(tp=4, ep=4), 64)["inter"] == 2048
    with pytest.raises(ValueError, match=r"^tp=3 must divide the 2048 expert columns of deepseek-r1$"):
        fused_moe_sizes(R1, Parallel(tp=3), 64)


def test_without_expert_parallelism_all_ranks_share_each_expert():
    """vLLM's and SGLang's MoE beside DP attention: 8 ranks, of which each has 64 tokens."""
    parallel = Parallel(dp=8)
    sizes = fused_moe_sizes(R1, parallel, rows_on_rank(R1, parallel, 64))
    assert (sizes["tokens"], sizes["inter"], sizes["ep"]) == (512, 256, 1)


def test_experts_are_routed_as_the_model_routes_them():
    """Kimi K2 has one group: fewer of its experts are hit than if half of eight groups were chosen, and a
    rank of eight gets other shares of the tokens."""
    k2, ep8 = model("kimi-k2"), Parallel(dp=8, ep=8)
    sizes = fused_moe_sizes(k2, TP8, 64)
    op = OPS["fused_moe"]
    assert op.sizes(sizes).group_limit == (1, 1) and "groups=1 group_topk=1" in op.case(sizes).text
    grouped = op.sizes(sizes | {"groups": 8, "group_topk": 4})
    assert (op.sizes(sizes).routed.hit, grouped.routed.hit) == (278, 286)
    assert "groups" not in op.case(fused_moe_sizes(R1, TP8, 64)).text
    here = rows_on_rank(k2, ep8, 64)
    assert op.sizes(fused_moe_sizes(k2, ep8, here)).routed.reach * 8 * 64 == pytest.approx(here, abs=1)
    assert here > rows_on_rank(replace(k2, n_group=8, topk_group=4), ep8, 64) * 1.2


def test_columns_of_experts_are_padded_and_said():
    cases = suite("kimi-k2-tp32").cases("fused_moe")
    assert {case.sizes["inter"] for case in cases} == {128}
    assert cases[0].place == "kimi-k2 tp32 decode, experts, 64 columns padded"


def test_a_suite_of_any_model(tmp_path):
    (tmp_path / "own").mkdir()
    data = ROOT / "shapes" / "data" / "kimi-k2.json"
    (tmp_path / "own" / "config.json").write_text(json.dumps(json.loads(data.read_text("utf-8"))["config"]))
    own, k2 = suite(f"{tmp_path}/own-tp8"), suite("k2-tp8")
    for op in SIZES:
        assert [c.key for c in own.cases(op)] == [c.key for c in k2.cases(op)] != []
    assert suite("deepseek-r1-dp8-ep8").cases("mla_decode") == suite("r1-dp-ep8").cases("mla_decode")
    for name, said in (
        ("kimi-k9-tp8", "unknown model 'kimi-k9'"),
        ("kimi-k2-tp0", "tp=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            suite(name)


def test_sparse_attention_leaves_the_prompts_that_are_dense():
    assert suite("v32-tp8").cases("mla_decode") == []
    assert [case.sizes["new"] for case in suite("v32-tp8").cases("mha_prefill")] == ["2048"]
    with pytest.raises(
        UsageError, match="no cases for mla_decode: a query reads only the index_topk=2048 keys"
    ):
        choose_cases(OPS["mla_decode"], "v32-tp8", (), None)


def test_listing_suites_imports_no_library_and_simulates_nothing():
    code = (
        "import sys; from shapes import bins; from shapes.suites import suites;"
        "[(s.name, s.description) for s in suites().values()];"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'pandas', 'numpy', 'scipy', 'triton', 'pydantic', 'kernels', 'harness'}),"
        "bins.token_bins.cache_info().misses)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[] 0"


@pytest.mark.parametrize("name", ["r1-tp8", "r1-tp4", "r1-dp-ep8"])
def test_a_step_that_verifies_drafts_has_their_tokens_too(name):
    """The same batches of requests, with 1 + drafts tokens of each."""
    for drafts in (1, 3):
        plain, verifying = suite(name), suite(f"{name}-mtp{drafts}")
        for op in CASES:
            for case, more in zip(plain.cases(op), verifying.cases(op), strict=True):
                wanted = dict(case.sizes)
                if "decode" in case.place:
                    assert more.place.startswith(case.place.partition(" decode")[0] + " decode with ")
                    if op == "mla_decode":
                        low, high = parse_span(wanted["ctx"])
                        own = 0 if low == high else drafts
                        wanted |= {"ctx": span_text(low + own, high + own), "q": 1 + drafts}
                    elif op == "block_scale_gemm" or "ep8" not in case.place:
                        first = next(iter(wanted))
                        wanted[first] *= 1 + drafts
                    else:  # of a rank that gets the tokens of its experts alone, a rounded share
                        assert abs(more.sizes["tokens"] - wanted["tokens"] * (1 + drafts)) <= drafts
                        wanted["tokens"] = more.sizes["tokens"]
                assert dict(more.sizes) == wanted and more.weight == case.weight
    assert suite("kimi-k2-tp16-mtp2").cases("mla_decode")[0].sizes["q"] == 3
    assert suite(f"{name}-mtp2").cases("mla_decode")[0].sizes["q"] == 3
    with pytest.raises(ValueError, match="has a degree twice"):
        suite("kimi-k2-tp8-tp4")
    for wrong in ("r1-tp8-mtp8", "r1-tp8-mtp", "k2-tp8-mtp0", "k2-tp8-mtp3x"):
        with pytest.raises(ValueError, match="-mtpN takes 1 to 7 drafts"):
            suite(wrong)
