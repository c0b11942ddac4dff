"""vLLM's own Triton kernels under their adapters, interpreted in a process of its own: this file.

Importing vLLM's modules needs more than its CPU build brings, and that switches Triton off: its files in REAL
stand between empty modules. Torch stands in for what vLLM compiles: the sort into blocks, SiLU, and the sum
over picks.
"""

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import kernels
from kernels.compose import bind
from kernels.engine_tuning import EngineConfig
from kernels.fused_moe.layouts import expert_ids
from kernels.fused_moe.providers import engine_triton
from kernels.mla_decode import layouts
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.tuning import values
from shapes.case import parse
from tests.support.interpreting import run_interpreted
from tests.support.lent_source import lend

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

GEMM, MOE, _, MLA = kernels.OPS
EXPERTS = "experts=8 topk=2 hidden=256 inter=128"
RAGGED = "batch=3 ctx=1..70"
CASES = [
    (GEMM, "m=9 n=300 k=600", "core"),
    (GEMM, "m=5 n=160 k=384", "with_quant"),
    (MOE, f"tokens=1 {EXPERTS}", "with_quant"),  # so few that vLLM does not sort
    (MOE, f"tokens=5 {EXPERTS} shared=1", "with_quant"),
    (MOE, f"tokens=5 {EXPERTS} ep=2 routing=uniform", "with_quant"),
    (MLA, f"{RAGGED} page=1", "core"),
    (MLA, "batch=2 ctx=1..70 heads=32 page=64", "core"),
    (MLA, "batch=2 ctx=3..70 page=16 q=3", "core"),
    (MLA, f"{RAGGED} page=16 kv=fp8", "core"),
]
TOLD = [
    (0, EngineConfig(16, 64, 128, 1, 4, 3)),
    (0, EngineConfig(32, 32, 64, 16, 8, 2)),
    (2, EngineConfig(16, 64, 128, 1, 4, 3)),
    (3, EngineConfig(64, 32, 64, 16, 8, 2)),
    (0, EngineConfig(16, 64, 256, 1, 4, 3)),
]
"""Of cases, what their rows are told to use; the last is wrong."""

DEFAULT = values(EngineConfig(64, 128, 128, 32, 4, 2))
LAYERS, QUANTISATION = "vllm.model_executor.layers.fused_moe", "vllm.model_executor.layers.quantization.utils"
REAL = {
    *(f"{LAYERS}.{name}" for name in ("fused_moe", "config", "activation", "moe_align_block_size", "utils")),
    *(f"{QUANTISATION}.{name}" for name in ("fp8_utils", "quant_utils", "ocp_mx_utils")),
    "vllm.scalar_type",
    "vllm.utils.math_utils",
    "vllm.v1.attention.ops.triton_decode_attention",
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


GIVEN: list[Any] = [None]


@contextlib.contextmanager
def override_config(config: Any) -> Iterator[None]:
    """Of fused_moe/__init__.py, which imports all of vLLM."""
    GIVEN.append(config)
    yield
    GIVEN.pop()


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
        LAYERS: {"get_config": lambda: GIVEN[-1], "override_config": override_config},
        f"{LAYERS}.modular_kernel": {"FusedMoEExpertsModular": modular},
    }


def interpret(op_name: str, text: str, boundary: str, broken: str = "", config: Any = None) -> list[str]:
    """What the judge has against a call, and against one after other live operands were loaded. What is bf16
    is fp32 of the same values, and so is all that lies between: the interpreter gets bf16 wrong.

    broken: `stale ids`, that are not brought up to date for the second call, or `scale`, another of the cache
    config: that the row is told to use
    """
    from tests.support.judging import judged

    op = kernels.OPS[op_name]
    (row,) = (i for i in kernels.implementations(op_name) if i.name == "vllm.triton")
    row = row.configured(config) if config else row
    sizes = op.sizes(parse(text)[0])

    def widened(live: int) -> Any:
        operands = op.operands(sizes, Seeds(1, live), "cpu", boundary)
        if op_name == GEMM:
            return operands
        wide = {n: t.float() for n, t in operands.live_tensors().items() if t.dtype == torch.bfloat16}
        more = {"kv_scale": operands.kv_scale * 32} if broken == "scale" else {}
        return operands.replaced(**wide, **more)

    out = None if row.allocates else op.empty_output(sizes, "cpu").float()
    with pytest.MonkeyPatch.context() as patch:
        if broken == "stale ids":
            patch.setattr(engine_triton, "expert_ids", ids_of_the_first)
        prepared = bind(op, row, widened(1), out)
    found = []
    for live in (1, 2):
        prepared.load(widened(live).live_tensors())
        if out is not None:
            out.fill_(torch.nan)
        prepared.call()
        fresh = op.operands(sizes, Seeds(1, live), "cpu", boundary)
        found.append(judged(op, row, sizes, fresh, prepared.result().bfloat16())["reason"])
    return found


def ids_of_the_first(operands: Any, values: list[int]) -> tuple[Any, Any, Any]:
    """As `expert_ids`, but calls do not bring them up to date."""
    ids, write, of_ids = expert_ids(operands, values)
    write()
    return ids, lambda: None, of_ids


def taken(op_name: str, text: str, boundary: str, place: str) -> list[Any]:
    """The file that vLLM looks for, what its table is said to hold, and what it launches with."""
    module, _, name = place.rpartition(".")
    kernel, launches = getattr(importlib.import_module(module), name), []

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: (
                launches.append(options),
                kernel[grid](*arguments, **options),
            )

    setattr(importlib.import_module(module), name, Recorder())
    interpret(op_name, text, boundary)
    (row,) = (i for i in kernels.implementations(op_name) if i.name == "vllm.triton")
    table = row.engine_table(kernels.OPS[op_name].sizes(parse(text)[0]))
    names = vars(EngineConfig(0, 0, 0, 0, 0, 0))
    options = {key: value for key, value in launches[0].items() if key in names}
    return [next(iter(table.files)), table.entry, options]


@pytest.mark.slow
def test_vllms_source_is_right_interpreted() -> None:
    found, stale, scaled, told, at = json.loads(run_interpreted("all", __file__).stdout.splitlines()[-1])
    assert found == [["", ""]] * len(CASES)
    assert (stale[0], bool(stale[1])) == ("", True) and all(scaled), "a break is not seen"
    right, wrong = told[:-1], told[-1]
    assert right == [["", ""]] * 4
    assert all(wrong), "K of two blocks' scales: the configuration is not the one that was told"
    gemm, moe, given = at
    assert gemm == [
        "N=300,K=600,device_name=none,dtype=fp8_w8a8,block_shape=[128,128].json",
        DEFAULT,
        DEFAULT,
    ]
    name, now, taken = moe
    assert name == "E=9,N=128,device_name=none,dtype=fp8_w8a8,block_shape=[128,128].json"
    assert now == taken and now["BLOCK_SIZE_M"] == 16, "not what vLLM launches with"
    assert given is None, "put back"


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    op = kernels.OPS[GEMM]
    (row,) = (i for i in kernels.implementations(GEMM) if i.name == "vllm.triton")
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        row.prepare(op.operands(op.sizes(parse(CASES[0][1])[0]), Seeds(), "cpu"), None)


if __name__ == "__main__":
    lend("vllm", REAL, given())
    torch.ops._C.silu_and_mul = silu_and_mul
    layouts.compute_units = lambda device: 4
    found = [interpret(*case) for case in CASES]
    told = [interpret(*CASES[case], config=values(config)) for case, config in TOLD]
    breaks = [interpret(*CASES[4], "stale ids"), interpret(*CASES[-1], "scale")]
    tables = [
        taken(*CASES[0], f"{QUANTISATION}.fp8_utils._w8a8_triton_block_scaled_mm"),
        taken(*CASES[3], f"{LAYERS}.fused_moe.fused_moe_kernel"),
    ]
    print(json.dumps([found, *breaks, told, [*tables, GIVEN[-1]]]))
