"""An engine's op that a swap replaces runs the suite's implementation: to the bit what the suite's own call
gives on the same operands."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import kernels
from harness.paths import RESULTS
from harness.serving.experiment.spec import Experiment
from harness.serving.live.engine.plugin_path import broken_modules, stage, stage_suite
from harness.serving.live.plugin.places import LINEARS
from harness.serving.live.plugin.suite import swapped
from harness.serving.live.swaps import ABSORBED, RENAMED, current_names, implementations, is_swap, known_swaps
from harness.serving.replay.child import BOUNDARY
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.operands import Seeds
from kernels.platform import detect

SIZES = {
    "block_scale_gemm": {"m": 5, "n": 256, "k": 512},
    "fused_moe": {"tokens": 5, "experts": 8, "topk": 4, "hidden": 512, "inter": 128},
    "mla_decode": {"batch": 3, "ctx": "70..129", "heads": 16, "page": 16},
    "mha_prefill": {"batch": 2, "new": "40..50", "heads": 16},
}


@pytest.fixture(scope="module")
def vllm():
    """vLLM's kernels, as the engine finds them: without packages that are broken here."""
    hidden = {name: sys.modules.get(name) for name in broken_modules()}
    sys.modules |= dict.fromkeys(hidden)
    try:
        pytest.importorskip("vllm._custom_ops")
    finally:
        for name, module in hidden.items():
            if module is None:
                sys.modules.pop(name, None)


@pytest.fixture(params=[name for name in known_swaps() if not name.startswith("absorbed")])
def swap(vllm, request):
    """(what the plug-in calls, operands, what the suite's own call makes of them)."""
    op = kernels.OPS[request.param.partition("=")[0]]
    implementation = swapped(request.param).implementation
    sizes = op.sizes(SIZES[op.name])
    operands = op.operands(sizes, Seeds(), "cpu", BOUNDARY.get(op.name, "core"))
    out = None if implementation.allocates else op.empty_output(sizes, "cpu")
    if not (support := implementation.available(detect("cpu"))).ok:
        pytest.skip(f"{request.param}: {support.reason}")
    prepared = implementation.prepare(operands, out)
    prepared.call()
    return swapped(request.param), operands, prepared.result()


@pytest.mark.slow
def test_what_the_engine_calls_is_the_suite_s_to_the_bit(swap, monkeypatch):
    import torch

    implementation, o, result = swap
    match implementation.implementation.op:
        case "block_scale_gemm":
            from harness.serving.live.plugin.block_scale_gemm import SwappedLinear

            linear = SwappedLinear(implementation, o.b_q, o.b_scale)
            assert torch.equal(linear(o.a), result)
            assert torch.equal(linear(o.a[None, :2]), linear(o.a[:2])[None])
        case "fused_moe":
            from harness.serving.live.plugin.fused_moe import Experts

            experts = Experts(implementation, o.w13, o.w13_scale, o.w2, o.w2_scale, topk=4)
            out = torch.full_like(o.x, float("nan"))
            experts(out, o.x, o.topk_weights, o.topk_ids.long())
            assert torch.equal(out, result)
        case "mha_prefill":
            from harness.serving.live.plugin.mha_prefill import prefill

            v = torch.cat([o.v, o.v], -1)[..., :128]  # as the engine splits it off
            assert torch.equal(prefill(implementation, o.q, o.k, v, o.cu_q, o.scale), result)
        case "mla_decode":
            from harness.serving.live.plugin.mla_decode import decode

            made = []
            for table in ("split_pages", "token_slots"):
                method = getattr(MlaDecodeOperands, table)
                noted = lambda self, n, method=method: made.append(n) or method(self, n)  # noqa: E731
                monkeypatch.setattr(MlaDecodeOperands, table, noted)
            step, fresh = (SimpleNamespace(block_table=o.page_table, seq_lens=o.lengths) for _ in range(2))
            assert torch.equal(decode(implementation, o.q, o.kv, step, o.scale), result)
            once, other = len(made), o.kv.flip(-1)  # another layer's cache: tables are made once in a step
            second = decode(implementation, o.q, other, step, o.scale)
            assert len(made) == once and not torch.equal(second, result)
            assert torch.equal(second, decode(implementation, o.q, other, fresh, o.scale))


def test_every_op_has_swaps_and_every_site_a_module():
    assert {name.partition("=")[0] for name in known_swaps()} == {*SIZES, "absorbed"}
    assert all(is_swap(f"block_scale_gemm:{place}=vllm.amx") for place in LINEARS)
    assert not is_swap("block_scale_gemm:kv_b=vllm.amx") and not is_swap("mla_decode:o_proj=vllm.vec")
    assert not is_swap("mla_decode=torch.compile"), "it would compile anew for each batch"
    assert not is_swap("mla_decode")
    with pytest.raises(LookupError):
        swapped("mla_decode=torch.none")
    new = current_names([*RENAMED, "mla_decode=vllm.vec", ABSORBED])
    assert all(map(is_swap, new)) and not any(name in RENAMED for name in new)


def test_recorded_experiments_name_the_kernels_that_their_replays_ran():
    recorded = sorted(RESULTS.glob("*/serving/*/experiment.json"))
    assert recorded
    for path in recorded:
        experiment = Experiment.model_validate_json(path.read_bytes())
        for swap in experiment.swaps:
            assert all(map(is_swap, swap.swap)), (path, swap)
            assert swap.replay.items() >= implementations(swap.swap).items(), (path, swap)


def test_the_staged_plug_in_hides_what_is_broken_and_the_suite_is_ours_whoever_has_the_name(tmp_path):
    """As where transformers has imported Hugging Face's `kernels` before the plug-in is loaded."""
    stage(tmp_path / "site", ("a_broken_package",))
    stage_suite(tmp_path / "suite")
    theirs = tmp_path / "site" / "kernels"
    (theirs / "layer").mkdir(parents=True)
    (theirs / "__init__.py").write_text("get_kernel = 'theirs'\n")
    (theirs / "layer" / "__init__.py").write_text("")
    code = f"""if True:
        import importlib.util, sys, kernels.layer
        from importlib.metadata import entry_points
        [entry] = [e for e in entry_points(group="vllm.general_plugins") if "kernel_bench" in e.name]
        entry.load()
        assert importlib.util.find_spec("a_broken_package") is None
        from deepseek_kernel_bench_plugin.suite import swapped
        implementation = swapped("mla_decode=vllm.vec").implementation
        import kernels
        assert kernels.__file__.startswith({str(tmp_path / "suite")!r})
        assert implementation.name == "vllm.vec" and kernels.get_kernel == "theirs"
        assert not {{"harness", "torch"}} & set(sys.modules)
    """
    environment = {"PYTHONPATH": str(tmp_path / "site"), "KERNEL_BENCH_SUITE": str(tmp_path / "suite")}
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
