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


def swaps_of(op):
    return [name for name in known_swaps() if name.startswith(f"{op}=")]


def of_the_suite(swap):
    """Operands of the op, and what the suite's own call makes of them."""
    op = kernels.OPS[swap.partition("=")[0]]
    implementation = swapped(swap).implementation
    sizes = op.sizes(SIZES[op.name])
    operands = op.operands(sizes, Seeds(), "cpu", BOUNDARY.get(op.name, "core"))
    out = None if implementation.allocates else op.empty_output(sizes, "cpu")
    if not (support := implementation.available(detect("cpu"))).ok:
        pytest.skip(f"{swap}: {support.reason}")
    prepared = implementation.prepare(operands, out)
    prepared.call()
    return operands, prepared.result()


@pytest.mark.slow
@pytest.mark.parametrize("swap", swaps_of("block_scale_gemm"))
def test_a_linear_is_the_suite_s_product(vllm, swap):
    import torch

    from harness.serving.live.plugin import block_scale_gemm

    operands, product = of_the_suite(swap)
    linear = block_scale_gemm.SwappedLinear(swapped(swap), operands.b_q, operands.b_scale)
    assert torch.equal(linear(operands.a), product)
    assert torch.equal(linear(operands.a[None, :2]), linear(operands.a[:2])[None])


@pytest.mark.slow
@pytest.mark.parametrize("swap", swaps_of("fused_moe"))
def test_experts_are_the_suite_s(vllm, swap):
    import torch

    from harness.serving.live.plugin import fused_moe

    o, result = of_the_suite(swap)
    experts = fused_moe.Experts(swapped(swap), o.w13, o.w13_scale, o.w2, o.w2_scale, topk=4)
    out = torch.full_like(o.x, float("nan"))
    experts(out, o.x, o.topk_weights, o.topk_ids.long())
    assert torch.equal(out, result)


@pytest.mark.slow
@pytest.mark.parametrize("swap", swaps_of("mla_decode"))
def test_decode_is_the_suite_s_in_every_layer_with_tables_made_once(vllm, swap, monkeypatch):
    import torch

    from harness.serving.live.plugin import mla_decode

    o, result = of_the_suite(swap)
    made = []
    for table in ("split_pages", "token_slots"):
        method = getattr(MlaDecodeOperands, table)
        monkeypatch.setattr(
            MlaDecodeOperands, table, lambda self, n, method=method: made.append(n) or method(self, n)
        )
    step = SimpleNamespace(block_table=o.page_table, seq_lens=o.lengths)
    implementation = swapped(swap)
    first = mla_decode.decode(implementation, o.q, o.kv, step, o.scale)
    once = len(made)
    other = o.kv.flip(-1)
    second = mla_decode.decode(implementation, o.q, other, step, o.scale)
    assert torch.equal(first, result) and len(made) == once
    fresh = SimpleNamespace(block_table=o.page_table, seq_lens=o.lengths)
    assert torch.equal(second, mla_decode.decode(implementation, o.q, other, fresh, o.scale))
    assert not torch.equal(second, first) and len(made) == 2 * once


@pytest.mark.slow
@pytest.mark.parametrize("swap", swaps_of("mha_prefill"))
def test_prefill_is_the_suite_s(vllm, swap):
    import torch

    from harness.serving.live.plugin import mha_prefill

    o, result = of_the_suite(swap)
    v = torch.cat([o.v, o.v], -1)[..., :128]  # as the engine splits it off
    assert torch.equal(mha_prefill.prefill(swapped(swap), o.q, o.k, v, o.cu_q, o.scale), result)


def test_every_op_has_swaps_and_every_site_a_module():
    assert {name.partition("=")[0] for name in known_swaps()} == {*SIZES, "absorbed"}
    assert all(is_swap(f"block_scale_gemm:{place}=vllm.amx") for place in LINEARS)
    assert not is_swap("block_scale_gemm:kv_b=vllm.amx") and not is_swap("mla_decode:o_proj=vllm.vec")
    assert not is_swap("mla_decode=torch.compile"), "it would compile anew for each batch"
    assert not is_swap("mla_decode")
    with pytest.raises(LookupError):
        swapped("mla_decode=torch.none")


def test_names_of_old_mean_the_same_kernels():
    new = current_names([*RENAMED, "mla_decode=vllm.vec", ABSORBED])
    assert all(map(is_swap, new)) and not any(name in RENAMED for name in new)
    assert len(current_names(["linears.attention=bf16"])) == 3


def test_recorded_experiments_name_the_kernels_that_their_replays_ran():
    recorded = sorted(RESULTS.glob("*/serving/*/experiment.json"))
    assert recorded
    for path in recorded:
        experiment = Experiment.model_validate_json(path.read_bytes())
        for swap in experiment.swaps:
            assert all(map(is_swap, swap.swap)), (path, swap)
            assert swap.replay.items() >= implementations(swap.swap).items(), (path, swap)


def python(code, tmp_path, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_staged_plug_in_is_found_and_hides_what_is_broken(tmp_path):
    stage(tmp_path / "site", ("a_broken_package",))
    python(
        "import importlib.util, sys\n"
        "from importlib.metadata import entry_points\n"
        "[entry] = [e for e in entry_points(group='vllm.general_plugins') if 'kernel_bench' in e.name]\n"
        "entry.load()\n"
        "assert importlib.util.find_spec('a_broken_package') is None\n"
        "assert sys.modules['a_broken_package'] is None\n"
        "assert not {'harness', 'kernels', 'torch'} & set(sys.modules)\n",
        tmp_path,
    )


def test_the_staged_suite_is_ours_whoever_else_has_the_name(tmp_path):
    """As where transformers has imported Hugging Face's package before the plug-in is loaded."""
    stage(tmp_path / "site", ())
    stage_suite(tmp_path / "suite")
    theirs = tmp_path / "site" / "kernels"
    (theirs / "layer").mkdir(parents=True)
    (theirs / "__init__.py").write_text("get_kernel = 'theirs'\n")
    (theirs / "layer" / "__init__.py").write_text("")
    python(
        "import sys, kernels.layer\n"
        "from deepseek_kernel_bench_plugin.suite import swapped\n"
        "implementation = swapped('mla_decode=vllm.vec').implementation\n"
        f"import kernels\nassert kernels.__file__.startswith({str(tmp_path / 'suite')!r})\n"
        "assert implementation.name == 'vllm.vec' and kernels.get_kernel == 'theirs'\n"
        "assert not {'harness', 'torch'} & set(sys.modules)\n",
        tmp_path,
        KERNEL_BENCH_SUITE=str(tmp_path / "suite"),
    )
