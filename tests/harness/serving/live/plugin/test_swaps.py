"""Names of swaps, and the plug-in that makes them, as staged for an engine. What they compute is seen in a
real vLLM: tests/harness/serving/live/engine/test_vllm.py."""

import subprocess
import sys

import pytest

from harness.paths import RESULTS
from harness.serving.experiment.spec import Experiment
from harness.serving.live.engine.plugin_path import stage, stage_suite
from harness.serving.live.plugin.places import LINEARS
from harness.serving.live.plugin.suite import swapped
from harness.serving.live.swaps import ABSORBED, RENAMED, current_names, implementations, is_swap, known_swaps


def test_every_op_has_swaps_and_every_site_a_module():
    ops = {"block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill", "absorbed"}
    assert {name.partition("=")[0] for name in known_swaps()} == ops
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
        import sys, kernels.layer
        from importlib.metadata import entry_points
        [entry] = [e for e in entry_points(group="vllm.general_plugins") if "kernel_bench" in e.name]
        entry.load()
        assert sys.modules["a_broken_package"] is None
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
