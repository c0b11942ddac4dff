"""vLLM's own Triton kernel, interpreted: in a process of its own, this file as a script."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kernels
from kernels.block_scale_gemm.providers.vllm_triton import VllmTritonGemm
from kernels.compose import bind
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.platform import detect
from shapes.case import parse
from tests.support.interpreting import run_interpreted

OP = kernels.OPS["block_scale_gemm"]
IMPLEMENTATION = VllmTritonGemm()
CASES = [
    ("m=1 n=128 k=128", "core"),
    ("m=9 n=300 k=600", "core"),
    ("m=70 n=192 k=384 scales=ue8m0", "core"),
    ("m=5 n=160 k=384", "with_quant"),
]


def interpret(text: str, boundary: str) -> list[dict[str, Any]]:
    from tests.support.judging import judged

    sizes = OP.sizes(parse(text)[0])
    operands = OP.operands(sizes, Seeds(), "cpu", boundary)
    prepared = bind(OP, IMPLEMENTATION, operands, None)
    reports = []
    for seed in (0, 1):
        live = OP.operands(sizes, Seeds(live=seed), "cpu", boundary).live_tensors()
        prepared.load(live)
        for name, tensor in live.items():
            getattr(operands, name).copy_(tensor)
        prepared.call()
        reports.append(judged(OP, IMPLEMENTATION, sizes, operands, prepared.result()))
    return reports


@pytest.fixture(scope="module")
def interpreted() -> list[list[dict[str, Any]]]:
    if not (support := IMPLEMENTATION.available(detect("cpu"))).ok:
        pytest.skip(support.reason)
    done = run_interpreted(__file__)
    # vLLM logs to standard output too.
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=[" ".join(case) for case in CASES])
def test_interpreted(interpreted: list[list[dict[str, Any]]], index: int) -> None:
    assert len(interpreted) == len(CASES)
    assert all(report["ok"] for report in interpreted[index]), interpreted[index]


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    operands = OP.operands(OP.sizes(parse(CASES[0][0])[0]), Seeds(), "cpu")
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        IMPLEMENTATION.prepare(operands, None)


if __name__ == "__main__":
    for arguments in CASES:
        print(json.dumps(interpret(*arguments)), flush=True)
