"""The tiny model made here, and with it a real vLLM: slow."""

import gzip
import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest

from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.checkpoint.directory import check_model, default_model
from harness.serving.live.checkpoint.shape import ModelShape
from harness.serving.live.client.request_times import request_times
from kernels.formats import dequantise_weights
from kernels.platform import detect
from tests.support.serving_processes import MARK, marked

TINY = ModelShape(
    hidden=1024, q_lora=512, heads=4, layers=2, dense_width=512, experts=8, picks=4, groups=4,
    groups_picked=2, vocabulary=512, longest=1024,
)  # fmt: skip


def test_the_model_is_made_once_always_the_same_and_keeps_the_scale_of_what_it_multiplies(
    tmp_path, monkeypatch
):
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    import torch

    from harness.serving.live.checkpoint.weights import tensors

    small = replace(TINY, hidden=256, q_lora=128, kv_lora=128, heads=1, dense_width=128)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    said = []
    folder = default_model(small, said.append)
    assert default_model(small, said.append) == folder and len(said) == 3
    assert check_model(folder)["quantization_config"]["weight_block_size"] == [128, 128]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    other = default_model(small)
    for file in folder.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name
    found, name = dict(tensors(TINY, "layer-000")), "model.layers.0.self_attn.q_a_proj"
    weight = dequantise_weights(found[f"{name}.weight"], found[f"{name}.weight_scale_inv"])
    x = torch.randn(64, TINY.hidden, generator=torch.Generator().manual_seed(0))
    assert (x @ weight.T).std().item() == pytest.approx(1.0, rel=0.1)


@pytest.mark.slow
def test_a_swap_is_served_timed_logged_and_left_no_process(tmp_path, cli):
    """Of each server most of the time is what its processes import: two servers, without a worker apart."""
    if importlib.util.find_spec("vllm") is None or "avx512_bf16" not in detect("cpu").features:
        pytest.skip("vllm is not installed, or serves no FP8 model here: it needs AVX-512 with bf16")
    alike = "VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS=1 --distributed-executor-backend uni"
    swaps = "mla_decode=torch.naive mha_prefill=torch.naive fused_moe=torch.bf16"
    swaps += " block_scale_gemm:o_proj=vllm.onednn 'block_scale_gemm:shared down=vllm.brgemm_bf16'"
    model, out = default_model(TINY), tmp_path / "out"
    (tmp_path / "tmp").mkdir()
    done = cli(
        *("serving", "run", "--model", model, "--out", out, "--isl", 64, "--osl", 48, "--pairs", 0),
        *("--prefill-pattern", "any", "--trace", "--routing-log"),
        *("--arm", f"base:{alike}", "--arm", f"swapped:{alike} {swaps}"),
        **{MARK: tmp_path, "TMPDIR": tmp_path / "tmp"},
    )
    assert done.returncode == 0, done.stderr
    assert not marked(str(tmp_path)) and not [path for path in tmp_path.rglob("*") if path.is_socket()]
    base, swapped = LiveJournal(out).of("observed")
    routing = np.load(out / base["routing"])
    assert set(routing["layer"]) == {0}  # one of its two layers has experts
    assert routing["ids"].shape[1] == TINY.picks
    # Two of four groups of two experts: six sets are possible, and not all tokens pick the same.
    assert len({tuple(sorted(row)) for row in routing["ids"]}) > 3
    kernels = (b"mla_decode_kvcache", b"decode_attention_cpu")
    for arm, has in ((base, True), (swapped, False)):
        trace = gzip.decompress((out / arm["trace"]).read_bytes())
        assert any(kernel in trace for kernel in kernels) == has
        assert request_times(out / arm["result"]).output_lens == (48, 48, 48, 48)
    texts = [json.loads((out / arm["result"]).read_text())["generated_texts"] for arm in (base, swapped)]
    same = [a.split()[0] == b.split()[0] for a, b in zip(*texts, strict=True)]
    assert same.count(True) >= 3  # of four
