"""vLLM's CPU kernels for linear layers: the one for FP8 with block scales, that it serves DeepSeek with on
Xeons, and those for bf16, which take dequantised weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import VendorFunction
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.fp8_to_fp32 import fp8_to_bf16
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import VllmCpu

if TYPE_CHECKING:
    import torch


class AmxGemm(VllmCpu):
    """`fp8_scaled_mm_cpu` (SGLang's CPU kernel), of CPUFp8BlockScaledMMKernel: W8A16. Built on
    oneDNN's brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not. The engine itself picks
    it only where there are AMX tiles (vllm/model_executor/kernels/linear/scaled_mm/cpu.py, vLLM 0.32)."""

    name = "vllm.amx"
    kernel = "fp8_scaled_mm_cpu"
    onednn_isa = "AVX512_CORE_BF16"
    boundaries = ("with_quant",)
    allocates = True
    rebinds = True

    STEP = 32  # both of N and K in its packed layout

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return Support.all_of(
            need(sizes.fp8 == "e4m3fn", f"takes e4m3fn, not {sizes.fp8}"),
            need(
                sizes.n % self.STEP == 0 and sizes.k % self.STEP == 0,
                f"needs n and k to be multiples of {self.STEP}",
            ),
        )

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.n * sizes.k

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(
        self, first: _AmxGemm | None, operands: BlockScaleGemmOperands, out: torch.Tensor | None
    ) -> Prepared:
        if first is not None and first.operands.b_q is operands.b_q:
            weights = first.weights
        else:
            weights = self.bind("convert_weight_packed")(operands.b_q)
        return _AmxGemm(operands, self.bind(), weights, True)


class Unpacked(AmxGemm):
    """The same kernel on weights as they are in the checkpoint, which it packs anew at each call: what an
    engine pays that forgets to do so once."""

    name = "vllm.amx_unpacked"

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return 0

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.n * sizes.k

    def prepare_turn(
        self, first: _AmxGemm | None, operands: BlockScaleGemmOperands, out: torch.Tensor | None
    ) -> Prepared:
        return _AmxGemm(operands, self.bind(), operands.b_q, False)


class _AmxGemm(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(
        self, operands: BlockScaleGemmOperands, kernel: VendorFunction, weights: torch.Tensor, packed: bool
    ) -> None:
        super().__init__(operands)
        self.kernel = kernel
        self.weights, self.packed = weights, packed

    def call(self) -> None:
        import torch

        o = self.operands
        self.out = self.kernel(
            o.a, self.weights, o.b_scale, [BLOCK, BLOCK], None, torch.bfloat16, self.packed
        )


class VllmDequantisedGemm(VllmCpu):
    """Weights dequantised to bf16 once, as vLLM would serve the model in bf16: twice the bytes of weights."""

    boundaries = ("with_quant",)
    allocates = True
    rebinds = True

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return 2 * sizes.n * sizes.k


class OneDnn(VllmDequantisedGemm):
    """`onednn_mm`: oneDNN's matmul with weights packed beforehand, vLLM's choice for bf16 linears on x86-64
    (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm, 0.32)."""

    name = "vllm.onednn"
    kernel = "onednn_mm"
    onednn_isa = "AVX512_CORE"

    ROWS = 32  # that vLLM has oneDNN pack for

    def prepare_turn(
        self, first: _Product | None, operands: BlockScaleGemmOperands, out: torch.Tensor | None
    ) -> Prepared:
        self.bind()
        from vllm import _custom_ops as ops

        if first is not None and first.operands.b_q is operands.b_q:
            handler = first.packed
        else:
            handler = ops.create_onednn_mm(fp8_to_bf16(operands.b_q, operands.b_scale).t(), self.ROWS)
        return _Product(operands, handler, lambda a: ops.onednn_mm(handler, a, None))


class BrgemmGemm(VllmDequantisedGemm):
    """`weight_packed_linear` (SGLang's CPU kernel), built on oneDNN's brgemm: vLLM's with
    VLLM_CPU_SGL_KERNEL."""

    name = "vllm.brgemm_bf16"
    kernel = "weight_packed_linear"
    onednn_isa = "AVX512_CORE_BF16"
    allocates = False

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        whole = sizes.n % AmxGemm.STEP == 0 and sizes.k % AmxGemm.STEP == 0
        return need(whole, f"needs n and k to be multiples of {AmxGemm.STEP}")

    def prepare_turn(
        self, first: _Product | None, operands: BlockScaleGemmOperands, out: torch.Tensor | None
    ) -> Prepared:
        assert out is not None  # it allocates none of its own
        kernel, is_packed = self.bind(), True
        if first is not None and first.operands.b_q is operands.b_q:
            packed = first.packed
        else:
            packed = self.bind("convert_weight_packed")(fp8_to_bf16(operands.b_q, operands.b_scale))

        def multiply(a: torch.Tensor) -> torch.Tensor:
            kernel(out, a, packed, None, is_packed)
            return out

        return _Product(operands, packed, multiply)


class _Product(Prepared):
    """packed: the weights as the library keeps them"""

    operands: BlockScaleGemmOperands

    def __init__(self, operands: BlockScaleGemmOperands, packed: object, multiply: VendorFunction) -> None:
        super().__init__(operands)
        self.packed, self.multiply = packed, multiply

    def call(self) -> None:
        self.out = self.multiply(self.operands.a)
