"""vLLM's own Triton MoE under its adapter, interpreted: in a process of its own, this file as a script.

Importing vLLM's module needs more than its CPU build brings: its files in REAL stand between empty modules.
Torch stands in for what vLLM compiles: the sort into blocks, SiLU, and the sum over picks.
"""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest

import kernels
from kernels.fused_moe.providers import vllm_triton
from kernels.operands import Seeds
from shapes.case import parse
from tests.support.interpreting import run_interpreted
from tests.support.lent_source import lend

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

OP = kernels.OPS["fused_moe"]
SMALL = "experts=8 topk=2 hidden=256 inter=128"
CASES = (
    f"tokens=1 {SMALL}",  # so few that vLLM does not sort
    f"tokens=5 {SMALL} shared=1",
    "tokens=5 experts=8 topk=2 hidden=256 inter=128 ep=2 routing=uniform",
)
MOE, QUANTISATION = "vllm.model_executor.layers.fused_moe", "vllm.model_executor.layers.quantization.utils"
REAL = {
    *(f"{MOE}.{name}" for name in ("fused_moe", "config", "activation", "moe_align_block_size", "utils")),
    *(f"{QUANTISATION}.{name}" for name in ("fp8_utils", "quant_utils", "ocp_mx_utils")),
    "vllm.scalar_type",
    "vllm.utils.math_utils",
}


def sorted_into_blocks(
    topk_ids: Any, experts: int, block: int, pairs: Any, of_block: Any, length: Any, expert_map: Any, _: Any
) -> None:
    """Each expert's pairs, filled up to blocks with none (fused_moe/moe_align_block_size.py)."""
    ids = topk_ids.flatten() if expert_map is None else expert_map[topk_ids.flatten().long()]
    pairs.fill_(topk_ids.numel())
    end = 0
    for expert in range(experts):
        of_expert = (ids == expert).nonzero().flatten()
        blocks = -(-len(of_expert) // block)
        pairs[end : end + len(of_expert)] = of_expert
        of_block[end // block : end // block + blocks] = expert
        end += blocks * block
    length.fill_(end)


def silu_and_mul(out: Any, x: Any) -> None:
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def register(op_name: str, op_func: Any, **_: Any) -> None:
    setattr(torch.ops.vllm, op_name, op_func)


def given() -> dict[str, dict[str, Any]]:
    """What the real files use of the others."""
    import triton
    import triton.language as tl

    def no(*_: Any) -> bool:
        return False

    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        simple_compile_backend="eager",
        dispatch_key="CPU",
        **dict.fromkeys(("is_rocm", "is_cuda", "is_cuda_alike", "is_xpu", "is_device_capability"), no),
        **dict.fromkeys(("is_fp8_fnuz", "is_cpu", "is_tpu"), no),
    )
    modular = SimpleNamespace(adjust_N_for_activation=lambda n, _: n // 2)
    return {
        "vllm.envs": dict.fromkeys(
            ("VLLM_TRITON_USE_TD", "VLLM_BATCH_INVARIANT", "VLLM_TUNED_CONFIG_FOLDER")
        ),
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.logger": {"init_logger": lambda name: SimpleNamespace(info=no, warning=no, warning_once=no)},
        "vllm._custom_ops": {
            "moe_align_block_size": sorted_into_blocks,
            "moe_sum": lambda x, out: torch.sum(x, 1, out=out),
        },
        "vllm.utils.torch_utils": {"direct_register_custom_op": register},
        "vllm.utils.import_utils": {"get_triton_kernels_version": lambda: None},
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": lambda: "none"},
        "vllm.utils.deep_gemm": {"is_deep_gemm_e8m0_used": lambda: False},
        MOE: {"get_config": lambda: None},
        f"{MOE}.modular_kernel": {"FusedMoEExpertsModular": modular},
    }


def interpret(text: str, stale: bool = False) -> list[str]:
    """What the judge has against a call, and against one after other live operands were loaded. x is fp32 of
    the same values, and so is all that lies between: the interpreter truncates where it should round.

    stale: the ids are not brought up to date for the second call
    """
    from tests.support.judging import judged

    implementation, sizes = vllm_triton.VllmTritonMoe(), OP.sizes(parse(text)[0])
    operands = OP.operands(sizes, Seeds(1, 1), "cpu", "with_quant")
    prepared = implementation.prepare(operands.replaced(x=operands.x.float()), None)
    found = []
    for live in (1, 2):
        fresh = OP.operands(sizes, Seeds(1, live), "cpu", "with_quant")
        prepared.load(fresh.live_tensors())
        prepared.call()
        if stale:
            prepared.local.write = lambda: None
        found.append(judged(OP, implementation, sizes, fresh, prepared.result().bfloat16())["reason"])
    return found


@pytest.mark.slow
def test_vllms_source_is_right_interpreted() -> None:
    done = run_interpreted(__file__)
    found = json.loads(done.stdout.splitlines()[-1])
    first, second = found.pop("stale ids")
    assert not first and second
    assert found == {text: ["", ""] for text in CASES}


if __name__ == "__main__":
    lend("vllm", REAL, given())
    torch.ops._C.silu_and_mul = silu_and_mul
    found = {text: interpret(text) for text in CASES}
    print(json.dumps(found | {"stale ids": interpret(CASES[-1], stale=True)}))
