"""How engines split a model, and which of their choices hold with what is set."""

from dataclasses import replace

import pytest

from kernels.engines import default, defaults
from kernels.engines.deploy import deployed, known_settings, settings, topk_columns
from shapes.models import model

R1 = model("deepseek-r1")
AITER = {"VLLM_ROCM_USE_AITER": "1"}
FUSED = AITER | {"VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS": "1"}
DEEPEP = {"moe-a2a-backend": "deepep"}


def split(engine, arch="gfx942", tp=8, ep=1, dp=False, given=None):
    return deployed(engine, arch, R1, tp, ep, dp, "bf16", given or {})


@pytest.mark.parametrize("engine, given, ep, dp, experts, wanted", [
    # experts: the rank's, its columns of each; wanted: columns of topk_ids, whether a mask goes with them
    ("vllm", AITER, 1, False, (256, 256), (8, False)),
    ("vllm", FUSED, 1, False, (257, 256), (9, False)),
    ("vllm", AITER, 8, True, (32, 2048), (8, True)),
    ("vllm", FUSED, 8, True, (33, 2048), (10, True)),
    ("sglang", {}, 1, False, (257, 256), (9, False)),
    ("sglang", {"disable-shared-experts-fusion": ""}, 1, False, (256, 256), (8, False)),
    ("sglang", {}, 8, False, (33, 2048), (9, True)),
    ("sglang", DEEPEP, 8, False, (32, 2048), (8, True)),
    ("sglang", {}, 1, True, (257, 256), (9, False)),
])  # fmt: skip
def test_what_reaches_aiters_experts(engine, given, ep, dp, experts, wanted):
    """As vLLM's expert_map_manager.py and rocm_aiter_moe.py and SGLang's token_dispatcher/standard.py do."""
    from shapes.deployment import sweep

    deployment = split(engine, ep=ep, dp=dp, given=given)
    sizes = next(call.sizes for call in sweep(deployment) if call.op == "fused_moe")
    local = int(sizes["experts"]) // int(sizes["ep"]) + int(sizes["shared"])
    assert (local, sizes["inter"]) == experts
    assert topk_columns(engine, deployment) == wanted


@pytest.mark.parametrize("engine, given, attention, dense, shared", [
    ("vllm", {}, 1, 1, 1),
    ("sglang", {}, 1, 8, 8),
    ("sglang", {"moe-dense-tp-size": "1"}, 1, 1, 8),
    ("sglang", DEEPEP, 1, 8, 1),
])  # fmt: skip
def test_dp_attention_leaves_linears_whole(engine, given, attention, dense, shared):
    deployment = split(engine, dp=True, given=given)
    assert (deployment.parallel.tp, deployment.dense_tp, deployment.shared_tp) == (attention, dense, shared)


def test_sglang_fuses_the_shared_expert_where_its_kernel_takes_it():
    archs = ("sm_90", "sm_100", "gfx950")
    assert [split("sglang", arch).shared for arch in archs] == [1, 0, 1]
    assert [split("sglang", arch, ep=8).shared for arch in archs] == [0, 0, 1]
    runners = ("triton", "deep_gemm", "flashinfer_trtllm_routed")
    on_blackwell = [split("sglang", "sm_100", given={"moe-runner-backend": name}).shared for name in runners]
    assert on_blackwell == [1, 1, 0]


def test_vllm_fuses_the_shared_expert_with_aiter_alone():
    assert [split("vllm", arch, given=FUSED).shared for arch in ("gfx942", "sm_90")] == [1, 0]
    assert split("vllm", given=FUSED | {"VLLM_ROCM_USE_AITER_MOE": "0"}).shared == 0


def test_experts_are_spread_over_all_ranks_or_none():
    with pytest.raises(
        ValueError, match=r"^--ep 4: experts are spread over all ranks here, so give --ep 8 or none$"
    ):
        split("vllm", ep=4)


def test_settings():
    texts = ["VLLM_ROCM_USE_AITER=1", "--moe-a2a-backend=deepep", "moe_dense_tp_size=1", "--enable-x"]
    assert settings(texts) == AITER | DEEPEP | {"moe-dense-tp-size": "1", "enable-x": ""}
    assert settings(["VLLM_ROCM_USE_AITER=True", "SGLANG_USE_AITER=false"]) == AITER | {
        "SGLANG_USE_AITER": "0"
    }
    with pytest.raises(ValueError, match=r"^cannot read 'FOO'; write NAME=VALUE, --flag=VALUE or --flag$"):
        settings(["FOO"])


def test_flags_of_entries_are_read():
    read = {entry.flags: entry.settings for engine in ("vllm", "sglang") for entry in defaults(engine)}
    assert read[""] == {}
    assert read["--moe-a2a-backend deepep"] == DEEPEP
    assert read["SGLANG_USE_AITER=0"] == {"SGLANG_USE_AITER": "0"}
    both = replace(defaults("vllm")[0], flags="--dp 2 --enable-dp-attention NAME=1")
    assert both.settings == {"dp": "2", "enable-dp-attention": "", "NAME": "1"}
    nested = "--attention-config.mla_prefill_backend"
    assert read[f"{nested} FLASHINFER"] == settings([f"{nested.replace('-c', '_c')}=FLASHINFER"])


def test_the_entry_with_most_flags_that_are_set_holds():
    sizes = {"m": 64, "n": 2112, "k": 7168}
    assert default("vllm", "block_scale_gemm", "gfx942", sizes, {}).row == "vllm.triton"
    assert default("vllm", "block_scale_gemm", "gfx942", sizes, AITER).row == "aiter.dispatch"
    assert (
        default("vllm", "block_scale_gemm", "gfx942", sizes, {"VLLM_ROCM_USE_AITER": "0"}).row
        == "vllm.triton"
    )
    assert default("vllm", "block_scale_gemm", "gfx906", sizes, {}) is None
    experts = {"tokens": 64, "ep": 8, "shared": 1, "experts": 256, "inter": 2048}
    assert default("vllm", "fused_moe", "gfx942", experts, AITER).row == ""
    assert default("vllm", "fused_moe", "gfx942", experts, FUSED).row == "aiter.dispatch"


def test_sglang_takes_aiters_attention_by_heads_over_tp():
    """`get_default_attn_backend`, also with DP attention, where a rank has more heads than that: with
    `--tp 4 --dp 4 --enable-dp-attention` it has 128 of them, and 32 over TP leave Triton's kernels."""

    def row(op, arch, heads, over_tp, **more):
        found = default("sglang", op, arch, {"q": 1, "heads": heads, "heads/tp": over_tp, **more})
        return found.row if found else None

    decoded = {over_tp: row("mla_decode", "gfx942", 128, over_tp, kv="bf16") for over_tp in (16, 32, 128)}
    assert decoded == {16: "aiter.asm", 32: "sglang.triton", 128: "aiter.asm"}
    # Kimi K2's 64 heads at TP4, and DeepSeek-R1's with --tp 8 --dp 2.
    assert [row("mla_decode", "gfx942", heads, 16, kv="bf16") for heads in (64, 32)] == [
        "aiter.asm_persistent"
    ] * 2
    assert row("mla_decode", "sm_90", 128, 32, kv="bf16") == "flash_attn.fa3@sglang"
    prefill = {prefix: row("mha_prefill", "gfx950", 128, 32, dtype="fp8", prefix=prefix) for prefix in "01"}
    assert prefill == {"0": "", "1": ""}, "aiter.fp8_ps is AITER's"
    assert row("mha_prefill", "gfx950", 64, 16, dtype="fp8", prefix="0") == "aiter.fp8_ps"


def test_settings_that_are_read():
    known = known_settings("vllm", ("block_scale_gemm", "fused_moe"), "gfx942")
    assert {"VLLM_ROCM_USE_AITER", "AITER_CONFIG_FMOE"} <= set(known)
    assert "VLLM_ROCM_USE_AITER" not in known_settings("vllm", ("fused_moe",), "sm_90")
    assert "moe-dense-tp-size" in known_settings("sglang", ("block_scale_gemm",), "sm_90")
