"""SGLang's own Triton kernels under its adapters, interpreted, in a process of its own: this file.

Where SGLang is installed: its import needs a GPU, so its files in REAL stand between empty modules. Operands
are fp32 of the same values: the interpreter gets bf16 wrong, and casts to FP8, so no cache is FP8 here.
"""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest

import kernels
from kernels.mla_decode.providers import sglang_triton
from kernels.operands import Seeds
from shapes.case import parse
from tests.support.interpreting import run_interpreted
from tests.support.lent_source import lend

pytest.importorskip("torch")
pytest.importorskip("triton")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

OPS = "sglang.kernels.ops"
REAL = {
    f"{OPS}.gemm.fp8_kernel",
    *(
        f"{OPS}.attention.{name}"
        for name in ("decode_attention", "extend_attention", "metadata", "score_mod")
    ),
}
CASES = (
    ("block_scale_gemm", "sglang.triton", "m=9 n=300 k=600"),
    ("mla_decode", "sglang.triton", "batch=3 ctx=1..130 page=16"),
    ("mla_decode", "sglang.triton", "batch=2 ctx=100..300 heads=128 page=64"),
    ("mha_prefill", "sglang.triton_extend", "batch=3 new=1..40 heads=2"),
    ("mha_prefill", "sglang.triton_extend", "batch=3 new=1..40 prefix=0..30 heads=2"),
)


def given() -> dict[str, dict[str, Any]]:
    """What the real files use of the others: a device that is neither NVIDIA's nor AMD's."""

    def no(*_: Any) -> bool:
        return False

    device = ("is_cuda", "is_hip", "is_gfx1250_supported", "is_gfx95_supported", "log_info_on_rank0")
    return {
        "sglang.srt.utils": dict.fromkeys(device, no) | {"get_device_name": lambda: "none"},
        "sglang.srt.utils.custom_op": {"register_custom_op": lambda **_: lambda function: function},
        "sglang.srt.runtime_context": {"get_platform": lambda: SimpleNamespace(is_sm90=False)},
    }


def interpret(op_name: str, name: str, text: str) -> list[str]:
    """What the judge has against a call, and against one after other live operands were loaded."""
    from tests.support.judging import judged

    op = kernels.OPS[op_name]
    (implementation,) = (i for i in kernels.implementations(op_name) if i.name == name)
    sizes = op.sizes(op.defaults("sm_90") | parse(text)[0])

    def widened(live: int) -> Any:
        operands = op.operands(sizes, Seeds(live=live), "cpu")
        wide = {n: getattr(operands, n, None) for n in ("q", "k", "v", "kv")}
        return operands.replaced(**{n: tensor.float() for n, tensor in wide.items() if tensor is not None})

    out = None if implementation.allocates else op.empty_output(sizes, "cpu").float()
    prepared = implementation.prepare(widened(0), out)
    found = []
    for live in (0, 1):
        prepared.load(widened(live).live_tensors())
        if out is not None:
            out.fill_(float("nan"))
        prepared.call()
        operands = op.operands(sizes, Seeds(live=live), "cpu")
        found.append(judged(op, implementation, sizes, operands, prepared.result().bfloat16())["reason"])
    return found


def test_sglangs_source_is_right_interpreted() -> None:
    done = run_interpreted(__file__)
    assert json.loads(done.stdout.splitlines()[-1]) == [["", ""]] * len(CASES)


if __name__ == "__main__":
    lend("sglang", REAL, given())
    sglang_triton.compute_units = lambda device: 4
    print(json.dumps([interpret(*case) for case in CASES]))
