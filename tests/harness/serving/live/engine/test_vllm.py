"""With a real vLLM, on a tiny model made here: slow."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.paths import ROOT
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.checkpoint.directory import check_model, default_model
from harness.serving.live.checkpoint.shape import ModelShape
from kernels.formats import dequantise_weights
from kernels.platform import detect

TINY = ModelShape(
    hidden=1024, q_lora=512, heads=4, layers=2, dense_width=512, experts=8, picks=4, groups=4,
    groups_picked=2, vocabulary=512, longest=1024,
)  # fmt: skip
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or "avx512_bf16" not in detect("cpu").features,
    reason="vllm is not installed, or serves no FP8 model here: it needs AVX-512 with bf16",
)
needs_safetensors = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None or importlib.util.find_spec("tokenizers") is None,
    reason="safetensors and tokenizers are not installed",
)


@needs_safetensors
def test_the_model_is_made_once_and_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    said, small = [], replace(TINY, hidden=256, q_lora=128, kv_lora=128, heads=1, dense_width=128)
    folder = default_model(small, said.append)
    assert len(said) == 3
    assert default_model(small, said.append) == folder
    assert len(said) == 3
    assert check_model(folder)["quantization_config"]["weight_block_size"] == [128, 128]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    other = default_model(small)
    for file in folder.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name


@needs_safetensors
def test_weights_keep_the_scale_of_what_they_multiply():
    import torch

    from harness.serving.live.checkpoint.weights import tensors

    found = dict(tensors(TINY, "layer-000"))
    name = "model.layers.0.self_attn.q_a_proj"
    weight = dequantise_weights(found[f"{name}.weight"], found[f"{name}.weight_scale_inv"])
    x = torch.randn(64, TINY.hidden)
    assert (x @ weight.T).std().item() == pytest.approx(1.0, rel=0.1)


@needs_vllm
@pytest.mark.slow
def test_a_swap_is_served_measured_logged_and_left_no_process(tmp_path):
    model = default_model(TINY)
    out = tmp_path / "out"
    command = [
        *(sys.executable, "-m", "harness", "serving", "run", "--model", str(model), "--out", str(out)),
        *("--isl", "64", "--osl", "48", "--pairs", "1", "--keep-disturbed", "--trace", "--routing-log"),
        *("--prefill-pattern", "any"),
        *(
            "--arm",
            "base",
            "--arm",
            "swapped:mla_decode=torch.naive fused_moe=torch.bf16"
            " 'block_scale_gemm:o_proj=vllm.onednn' 'block_scale_gemm:shared down=vllm.brgemm_bf16'",
        ),
    ]
    (tmp_path / "tmp").mkdir()
    mark = {"KERNEL_BENCH_TEST": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=dict(os.environ) | mark,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    journal = LiveJournal(out)
    assert [run["status"] for run in journal.of("run")] == ["ok", "ok"]
    for run in journal.of("run"):
        assert run["steady_intervals"] > 24
        assert run["steady_itl_ms"] > 0
    base, swapped = journal.of("observed")
    routing = np.load(out / base["routing"])
    assert set(routing["layer"]) == {0}  # one of its two layers has experts
    assert routing["ids"].shape[1] == TINY.picks
    # Two of four groups of two experts: six sets are possible, and not all tokens pick the same.
    assert len({tuple(sorted(row)) for row in routing["ids"]}) > 3
    kernels = (b"mla_decode_kvcache", b"decode_attention_cpu")
    assert any(kernel in _unpacked(out / base["trace"]) for kernel in kernels)
    assert not any(kernel in _unpacked(out / swapped["trace"]) for kernel in kernels)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert f"KERNEL_BENCH_TEST={tmp_path}".encode() not in (folder / "environ").read_bytes()
        except OSError:
            continue
    assert not [path for path in tmp_path.rglob("*") if path.is_socket()]
    texts = [json.loads((out / run["result"]).read_text())["generated_texts"] for run in journal.of("run")]
    first = [[text.split()[0] for text in of_run] for of_run in texts]
    assert sum(a == b for a, b in zip(*first, strict=True)) >= 3  # of four


def _unpacked(file):
    import gzip

    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
