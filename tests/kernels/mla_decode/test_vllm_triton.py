"""vLLM's Triton kernel of MLA decode under its adapter: its real source, in Triton's interpreter.

vLLM switches Triton off on a CPU, so that its module stands here without the rest of vLLM. Whether Triton
interprets is settled when it is imported: the cases run in a process of their own (this file, as a script).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kernels
from harness.workers.child.judge import judge
from kernels.mla_decode.providers import vllm_triton
from kernels.operands import Seeds
from shapes.case import parse
from tests.support.interpreting import run_interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if importlib.util.find_spec("vllm") is None:  # importing it takes seconds
    pytest.skip("vLLM is not installed", allow_module_level=True)

OP = kernels.OPS["mla_decode"]
RAGGED = "batch=3 ctx=1..70"
VLLM = (
    f"{RAGGED} page=1",
    f"{RAGGED} page=16",
    "batch=2 ctx=1..70 heads=32 page=64",
    f"{RAGGED} page=16 kv=fp8",
)


def lend_vllm_source() -> None:
    """The module of vLLM's kernels under its own name, without the rest of vLLM."""
    import triton
    import triton.language as tl

    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["vllm.platforms"] = SimpleNamespace(current_platform=SimpleNamespace(is_rocm=lambda: False))
    sys.modules["vllm.triton_utils"] = SimpleNamespace(triton=triton, tl=tl)
    name = "vllm.v1.attention.ops.triton_decode_attention"
    spec = importlib.util.spec_from_file_location(
        name, folder / "v1/attention/ops/triton_decode_attention.py"
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def interpret(text: str, scale: float = 1.0) -> list[bool]:
    """Whether both calls are right, on operands of the same values in fp32: the interpreter's tl.dot gets
    bf16 wrong. `scale` is put on the cache's scale."""
    sizes = OP.sizes(parse(text)[0])

    def widened(live: int) -> Any:
        operands = OP.operands(sizes, Seeds(live=live), "cpu")
        kv = operands.kv.float() if sizes.kv == "bf16" else operands.kv
        return operands.replaced(q=operands.q.float(), kv=kv, kv_scale=operands.kv_scale * scale)

    out = OP.empty_output(sizes, "cpu").float()
    prepared = vllm_triton.VllmTritonMlaDecode().prepare(widened(0), out)
    right = []
    for live in (0, 1):
        prepared.load(widened(live).live_tensors())
        out.fill_(torch.nan)
        prepared.call()
        reference = OP.reference(OP.operands(sizes, Seeds(live=live), "cpu"))
        right.append(judge(out.bfloat16(), reference, OP.tolerance(sizes))["ok"])
    return right


@pytest.mark.slow
def test_vllms_source_is_right_interpreted() -> None:
    done = run_interpreted(__file__)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("kv scale missing") == [False, False]
    assert found == {text: [True, True] for text in VLLM}


if __name__ == "__main__":
    lend_vllm_source()
    vllm_triton.compute_units = lambda device: 4
    found = {text: interpret(text) for text in VLLM}
    print(json.dumps(found | {"kv scale missing": interpret(VLLM[-1], scale=32.0)}))
