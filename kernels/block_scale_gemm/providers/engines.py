"""Kernels that vLLM and SGLang build or write themselves: CUTLASS's products, the Triton kernel that both
have, and SGLang's product for few tokens. CUTLASS's and the last are untested on hardware.

CUTLASS: cutlass_scaled_mm of vLLM 0.33 (_custom_ops.py; csrc/libtorch_stable/quantization/w8a8/cutlass:
scaled_mm_entry.cu, c3x/scaled_mm_blockwise_sm{90,100,120}_fp8_dispatch.cuh) and its caller
model_executor/kernels/linear/scaled_mm/cutlass.py; kernels/ops/gemm/fp8_blockwise_gemm.py and
kernels/jit/csrc/gemm/fp8_blockwise/ of SGLang 0.5.18 and 0.5.23, and the caller srt/layers/quantization/
fp8_utils.py. Neither kernel looks at the strides of scales: both read those of a column by column, and those
of b with the blocks of K next to each other.

Triton: the engines' product where nothing faster takes the sizes or the device. Read in vLLM 0.32 and 0.33:
model_executor/layers/quantization/utils/fp8_utils.py, triton_utils/importing.py; and in SGLang 0.5.10, 0.5.18
and 0.5.23, which keep it in three places, and at 008601f. SGLang's general entry point may run DeepGEMM. So
the row calls the function that runs Triton alone. Versions without that function get the general one, with
DeepGEMM switched off by the environment (vendor.Sglang).

Few tokens on gfx950: kernels/ops/gemm/smallm_fp8_blockscale_gfx950/ of SGLang 0.5.23, and its callers
fp8_utils.py and fp8.py in srt/layers/quantization.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kernels import platform as platforms
from kernels.binding import BindingError, Function
from kernels.block_scale_gemm.layouts import multiples, padded, padding_bytes, prepared
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.block_scale_gemm.providers.aiter import SHUFFLE, marked_tiles
from kernels.block_scale_gemm.triton.split_k import interpreted_s
from kernels.engine_tuning import EngineConfig, EngineEntry, EngineLookUp, EngineTuned, nearest_of
from kernels.formats import BLOCK
from kernels.lazy import torch
from kernels.op import Call, Prepared, Unsupported, implementation
from kernels.support import Support, need
from kernels.tables.engine_json import RULES, file_name
from kernels.triton_runtime import TritonImplementation, require_interpreter
from kernels.tuning import Target, values
from kernels.vendor import BLACKWELL, Sglang, Vllm

# CUTLASS

SM90_ROWS = 4  # on sm_90, M must be a multiple of this
STREAM_K = 2 * 188 * 4 * 128 * 128
"""Bytes for the parts of sums of CUTLASS's StreamK, an estimate: fp32 tiles of 128 x 128, two waves on 188
SMs (an RTX PRO 6000). SGLang takes StreamK where the last wave of tiles would leave most SMs idle, above 64
rows in 0.5.18 and above 256 in 0.5.23."""
CUTLASS_OF_VLLM = Function("vllm._custom_ops.cutlass_scaled_mm", needs="a b scale_a scale_b out_dtype")
CUTLASS_OF_SGLANG = Function(
    "sglang.kernels.ops.gemm.fp8_blockwise_gemm.fp8_blockwise_scaled_mm",
    needs="mat_a mat_b scales_a scales_b out_dtype",
)


@implementation(
    "vllm.cutlass",
    Vllm,
    requires="vLLM for CUDA (read at 0.33), CUDA 12.8 or later, sm_90 or later",
    kinds=("cuda",),
    archs=("sm_90", *BLACKWELL, "sm_120"),
    allocates=True,
    symbols=(CUTLASS_OF_VLLM,),
    fits=lambda sizes: multiples(sizes, 16),
    workspace=lambda sizes: padding_bytes(sizes, SM90_ROWS),
)
def cutlass_of_vllm(operands: BlockScaleGemmOperands, out: None) -> Prepared:
    """On sm_90 the call also computes rows of zeros where M is not a multiple of four."""
    return cutlass(CUTLASS_OF_VLLM, operands)


@implementation(
    "sglang.cutlass",
    Sglang,
    requires="SGLang 0.5.18 or later for CUDA (read at 0.5.23), nvcc, sm_120",
    since="0.5.18",  # the first that was read to have it
    kinds=("cuda",),
    archs=("sm_120",),
    allocates=True,
    symbols=(CUTLASS_OF_SGLANG,),
    fits=lambda sizes: multiples(sizes, BLOCK),
    workspace=lambda sizes: 4 * sizes.m * sizes.k_blocks,  # the scales of a; no row is padded
    scratch=lambda sizes: STREAM_K if sizes.m > 64 else 0,
)
def cutlass_of_sglang(operands: BlockScaleGemmOperands, out: None) -> Prepared:
    """The kernel is compiled at the first call."""
    return cutlass(CUTLASS_OF_SGLANG, operands)


def cutlass(function: Function, operands: BlockScaleGemmOperands) -> Prepared:
    """The call of a function that takes a, b, their scales and the output's dtype, in this order."""
    multiple = SM90_ROWS if platforms.of(operands.b_q.device).arch == "sm_90" else 1
    a_q, a_scale = padded(operands, multiple)
    arguments = (a_q, operands.b_q.t(), a_scale, operands.b_scale.t(), torch.bfloat16)
    multiply = function.bind(**dict(zip(function.needs, arguments, strict=True)))
    return prepared(operands, None, multiply, a_q, a_scale)


# Few tokens

FEW_TOKENS = Function(
    "sglang.kernels.ops.gemm.smallm_fp8_blockscale_gfx950.try_smallm_fp8_bs_linear", needs="x WQ w_scale"
)
FEW_TOKENS_SHAPES = ((5120, 4096), (4608, 4096), (4096, 2048), (2560, 4096), (4096, 1024))
"""The n and k that SGLang's kernel takes (SHAPES in its module). No layer of DeepSeek-R1 has these sizes."""

FEW_TOKENS_M = 32  # the largest m that it takes


def fits_few_tokens(sizes: BlockScaleGemmSizes) -> Support:
    known = " ".join(f"{n}x{k}" for n, k in FEW_TOKENS_SHAPES)
    is_known = need((sizes.n, sizes.k) in FEW_TOKENS_SHAPES, f"takes these n and k alone: {known}")
    return Support.all_of(is_known, need(sizes.m <= FEW_TOKENS_M, f"takes {FEW_TOKENS_M} tokens at most"))


@implementation(
    "sglang.small_m",
    Sglang,
    requires="SGLang 0.5.23 for ROCm with AITER and hipcc, gfx950",
    since="0.5.23",
    boundaries=("with_quant",),
    activations="fp8",
    allocates=True,
    kinds=("rocm",),
    archs=("gfx950",),
    also=("aiter",),
    symbols=(FEW_TOKENS, SHUFFLE),
    fits=fits_few_tokens,
    layout=lambda sizes: sizes.n * sizes.k,
)
def small_m(operands: BlockScaleGemmOperands, out: None) -> Call:
    """hipcc compiles it at the first call. The weights lie as AITER shuffles them."""
    multiply = FEW_TOKENS.bind(x=operands.a, WQ=marked_tiles(operands.b_q), w_scale=operands.b_scale)
    if multiply() is None:
        raise Unsupported("SGLang's kernel for few tokens does not run here: see what it printed")
    return multiply


# Triton

TILE_M = 64  # rows of a tile in vLLM's default configuration, which it takes on a CPU

LOOK_UP = "get_w8a8_block_fp8_configs"
"""The function that both engines call for a table, in the module of the product."""


@dataclass(frozen=True)
class GemmTables(EngineLookUp):
    """How an engine looks up a configuration. To force one, the engine's look-up function is replaced for the
    time of a call by a function that returns it."""

    engine: str  # a key of RULES, which has the engine's default and how its files' names write the block
    multiply: Function  # the product
    find_table: Function  # returns its table for a weight, from M to configuration, or None
    find_device: Function  # returns the device's name

    def overridden(self, config: EngineConfig | None) -> Callable[[], AbstractContextManager[Any]]:
        """Returns a function whose context forces the configuration, or changes nothing for None. Raises
        BindingError where the product does not call the look-up."""
        if config is None:
            return contextlib.nullcontext
        multiply = self.multiply.find()
        entry = values(config)
        module_globals = multiply.__globals__
        if LOOK_UP not in module_globals or LOOK_UP not in multiply.__code__.co_names:
            raise BindingError(f"{self.multiply.places[0]} does not ask {LOOK_UP}")

        def forced_table(*_: object) -> dict[int, EngineEntry]:
            """A table of one entry, which is therefore the nearest for every M."""
            return {0: dict(entry)}

        @contextlib.contextmanager
        def override() -> Iterator[None]:
            own_look_up = module_globals[LOOK_UP]
            module_globals[LOOK_UP] = forced_table
            try:
                yield
            finally:
                module_globals[LOOK_UP] = own_look_up

        return override

    def m_of(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.m

    def table(self, sizes: BlockScaleGemmSizes) -> Mapping[int, EngineEntry] | None:
        find: Callable[[], Any] = self.find_table.bind(N=sizes.n, K=sizes.k, block_n=BLOCK, block_k=BLOCK)
        return find() or None  # engines treat an empty table as none

    def entry(self, sizes: BlockScaleGemmSizes, m: int) -> EngineEntry:
        table = self.table(sizes)
        return RULES[self.engine].gemm_default if table is None else table[nearest_of(table, m)]

    def file_name(self, sizes: BlockScaleGemmSizes) -> str:
        device = str(self.find_device.bind()()).replace(" ", "_")
        return file_name(f"N={sizes.n},K={sizes.k}", device, RULES[self.engine].block)


ARGUMENTS = "A B As Bs block_size output_dtype"
LOOK_UP_ARGUMENTS = "N K block_n block_k"

VLLM = "vllm.model_executor.layers.quantization.utils.fp8_utils"
TRITON_OF_VLLM = Function(f"{VLLM}.w8a8_triton_block_scaled_mm", needs=ARGUMENTS)
TABLES_OF_VLLM = GemmTables(
    "vllm",
    TRITON_OF_VLLM,
    find_table=Function(f"{VLLM}.{LOOK_UP}", needs=LOOK_UP_ARGUMENTS),
    find_device=Function(f"{VLLM}.get_device_name_as_file_name"),
)

SGLANG = (
    "sglang.kernels.ops.gemm.fp8_kernel",
    "sglang.kernels.ops.quantization.fp8_kernel",
    "sglang.srt.layers.quantization.fp8_kernel",
)
TRITON_OF_SGLANG = Function(
    *(f"{place}.w8a8_block_fp8_matmul_triton" for place in SGLANG),
    f"{SGLANG[-1]}.w8a8_block_fp8_matmul",
    needs=ARGUMENTS,
)
TABLES_OF_SGLANG = GemmTables(
    "sglang",
    TRITON_OF_SGLANG,
    find_table=Function(*(f"{place}.{LOOK_UP}" for place in SGLANG), needs=LOOK_UP_ARGUMENTS),
    find_device=Function("sglang.srt.utils.get_device_name"),
)


class TritonGemm(EngineTuned):
    """What the rows of both engines share."""

    allocates = True
    depths = (128, 64)  # values of BLOCK_SIZE_K
    tables: GemmTables

    def configurations(self, target: Target, sizes: BlockScaleGemmSizes) -> Iterator[EngineConfig]:
        """Where one tile holds all rows, GROUP_SIZE_M has no effect, so that 1 is its only value."""
        for config in super().configurations(target, sizes):
            if config.GROUP_SIZE_M == 1 or sizes.m > config.BLOCK_SIZE_M:
                yield config

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        # The interpreter truncates to bf16 where it should round. There torch rounds the output.
        interpreted = operands.b_q.device.type == "cpu"
        multiply = self.tables.multiply.bind(
            A=operands.a_q, As=operands.a_scale, B=operands.b_q, Bs=operands.b_scale,
            block_size=[BLOCK, BLOCK], output_dtype=torch.float32 if interpreted else torch.bfloat16,
        )  # fmt: skip
        return self.prepared(operands, (lambda: multiply().bfloat16()) if interpreted else multiply)


class VllmTritonGemm(Vllm, TritonImplementation, TritonGemm):
    """vLLM has tuned configurations for some sizes and devices. The kernel takes all operands as they are."""

    name = "vllm.triton"
    requires = "vLLM with Triton, read in 0.32 (on cpu through its interpreter: checked, never timed)"
    runtime = "vllm_triton"
    kinds = ("cuda", "rocm", "cpu")
    symbols = (TRITON_OF_VLLM,)
    tables = TABLES_OF_VLLM
    how_to_use = f"copy it to {VLLM.rpartition('.')[0].replace('.', '/')}/configs"

    def interpreted_s(self, sizes: BlockScaleGemmSizes) -> float:
        return interpreted_s(sizes, TILE_M)

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        """On a CPU, the product in fp32."""
        return 4 * sizes.m * sizes.n

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        require_interpreter(operands.b_q.device)
        with _device_for_triton(operands.b_q.device):
            return super().prepare(operands, out)


class SglangTritonGemm(Sglang, TritonGemm):
    name = "sglang.triton"
    requires = "SGLang with Triton, cuda or rocm (read to 0.5.23)"
    symbols = (TRITON_OF_SGLANG,)
    tables = TABLES_OF_SGLANG
    how_to_use = "copy it to sglang/kernels/ops/gemm/configs (up to 0.5.18 srt/layers/quantization/configs)"

    def configurations(self, target: Target, sizes: BlockScaleGemmSizes) -> Iterator[EngineConfig]:
        """On AMD's GPUs SGLang raises BLOCK_SIZE_K to that of a scale (get_w8a8_block_fp8_configs)."""
        for config in super().configurations(target, sizes):
            if target.kind == "cuda" or config.BLOCK_SIZE_K == BLOCK:
                yield config


@contextlib.contextmanager
def _device_for_triton(device: torch.device) -> Iterator[None]:
    """vLLM takes Triton for missing where Triton finds no device, although the interpreter needs none. So on
    a CPU some backend stands in the place of a CPU's until vLLM is imported."""
    from triton.backends import backends

    if device.type != "cpu" or "cpu" in backends:
        yield
        return
    backends["cpu"] = next(iter(backends.values()))  # any will do: vLLM only counts them
    try:
        import vllm.triton_utils  # noqa: F401

        yield
    finally:
        del backends["cpu"]
