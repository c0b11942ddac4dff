"""Each kernel that a swap puts in place computes what the op computes, on small operands."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from harness.serving.live.engine.plugin_path import broken_modules, stage
from harness.serving.live.plugin.catalogue import _MODULES, SWAPS
from harness.serving.op_classes import OP_CLASSES

torch = pytest.importorskip("torch")
TOLERANCE = 0.02  # relative, of bf16 products with fp32 sums


@pytest.fixture(scope="module")
def vllm():
    """vLLM's kernels, as the engine finds them: without packages that are broken here."""
    hidden = {name: sys.modules.get(name) for name in broken_modules()}
    sys.modules |= dict.fromkeys(hidden)
    try:
        ops = pytest.importorskip("vllm._custom_ops")
    finally:
        for name, module in hidden.items():
            if module is None:
                sys.modules.pop(name, None)
    if not (hasattr(torch.ops._C, "fp8_scaled_mm_cpu") and torch.cpu._is_avx512_bf16_supported()):
        pytest.skip("no vLLM for CPUs, or no AVX-512 with bf16")
    torch.manual_seed(0)
    return ops


def part(name):
    return importlib.import_module(f"harness.serving.live.plugin.{name}")


def near(found, wanted):
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item() < TOLERANCE


def weight(*size):
    values = (torch.randn(*size) * 99).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = (*size[:-2], -(-size[-2] // 128), -(-size[-1] // 128))
    return values, (0.5 + torch.rand(blocks)) * 0.01 / size[-1] ** 0.5


def test_every_swap_names_a_class_and_its_kernel():
    for name, swap in SWAPS.items():
        assert name == swap.name
        assert swap.op_class in OP_CLASSES
        assert swap.site in _MODULES
        assert swap.phase in ("decode", "prefill", "both")
    assert {swap.op_class for swap in SWAPS.values()} >= {
        "mla_decode",
        "block_scale_gemm",
        "fused_moe",
        "mha_prefill",
    }


@pytest.mark.parametrize(
    "kernel", ["_mla_decode_kvcache", "_decode_attention_cpu", "_torch", "_torch_padded", "_sdpa"]
)
@pytest.mark.parametrize("page", [16, 64])
def test_mla_decode(vllm, kernel, page):
    lengths = torch.tensor([70, 129, 1])
    cache = torch.randn(32, page, 576).bfloat16()
    pages = -(-129 // page)
    table = torch.randperm(32)[: 3 * pages].reshape(3, pages).int()
    q = torch.randn(3, 16, 576).bfloat16()
    metadata = SimpleNamespace(decode=SimpleNamespace(block_table=table, seq_lens=lengths.int()))
    found = getattr(part("mla_decode"), kernel)(q, cache, metadata, 0.07, 512)
    for i, length in enumerate(lengths.tolist()):
        keys = cache[table[i].long()].reshape(-1, 576)[:length].float()
        wanted = torch.softmax(q[i].float() @ keys.T * 0.07, -1) @ keys[:, :512]
        assert near(found[i], wanted)


@pytest.mark.parametrize("kernel", ["_bf16", "_bf16_brgemm", "_unpacked"])
def test_linears(vllm, kernel):
    values, scale = weight(256, 512)
    x = torch.randn(4, 512).bfloat16()
    layer = SimpleNamespace(prefix="model.layers.0.self_attn.o_proj")
    linear = getattr(part("linears"), kernel)(
        SimpleNamespace(weight_group_shape=(128, 128)), layer, values, scale
    )
    wanted = x.float() @ (values.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).T
    assert near(linear(x, None), wanted)


@pytest.mark.parametrize("kernel", ["_Brgemm", "_Vec", "_Grouped", "_Torch"])
def test_experts(vllm, kernel):
    import torch.nn.functional as F

    dequantised = part("dequantise").dequantised
    w13, w2 = dequantised(*weight(8, 256, 512)), dequantised(*weight(8, 512, 128))
    w13, w2 = w13 / w13.std() / 512**0.5, w2 / w2.std() / 128**0.5
    x, weights = torch.randn(5, 512).bfloat16(), torch.rand(5, 4)
    ids = torch.stack([torch.randperm(8)[:4] for _ in range(5)]).int()
    out = torch.empty_like(x)
    getattr(part("experts"), kernel)(w13, w2)(out, x, weights, ids)
    wanted = torch.zeros(5, 512)
    for token in range(5):
        for expert, share in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (w13[expert].float() @ x[token].float()).chunk(2)
            wanted[token] += share * (w2[expert].float() @ (F.silu(gate) * up))
    assert near(out, wanted)


def test_grouped_experts_are_the_kernel_that_a_replay_has(vllm):
    """To the bit: what an experiment predicts of torch.bf16 is observed of this."""
    from kernels.fused_moe.providers.torch_eager import _fused_moe

    w13, w2 = (torch.randn(8, *size).bfloat16() / 16 for size in ((512, 256), (256, 256)))
    x, weights = torch.randn(9, 256).bfloat16(), torch.rand(9, 4)
    ids = torch.stack([torch.randperm(8)[:4] for _ in range(9)]).int()
    ids[0, 2] = ids[5] = -1  # another rank's
    out = torch.full_like(x, float("nan"))
    part("experts")._Grouped(w13, w2)(out, x, weights, ids)
    wanted = _fused_moe(x, ids, weights, w13, w2, torch.arange(8, dtype=torch.int32))
    assert torch.equal(out, wanted.to(out.dtype)) and out.any()


@pytest.mark.parametrize("kernel", ["_sdpa", "_extend"])
def test_prefill(vllm, kernel):
    q, k, v = (torch.randn(90, 16, width).bfloat16() for width in (192, 192, 128))
    found = getattr(part("prefill"), kernel)(q, k, v, [0, 50, 90], 0.07)
    for start, end in ((0, 50), (50, 90)):
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k[start:end].float()) * 0.07
        scores.masked_fill_(torch.ones(end - start, end - start).triu(1).bool(), float("-inf"))
        wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:end].float())
        assert near(found[start:end], wanted)


def test_the_staged_plug_in_is_found_and_hides_what_is_broken(tmp_path):
    import subprocess

    stage(tmp_path, ("a_broken_package",))
    code = (
        "import importlib.util, sys\n"
        "from importlib.metadata import entry_points\n"
        "[entry] = [e for e in entry_points(group='vllm.general_plugins') if 'kernel_bench' in e.name]\n"
        "entry.load()\n"
        "assert importlib.util.find_spec('a_broken_package') is None\n"
        "assert sys.modules['a_broken_package'] is None\n"
        "assert 'harness' not in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
