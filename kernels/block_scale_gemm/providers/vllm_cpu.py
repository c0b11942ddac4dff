"""vLLM's CPU kernels for linear layers: the one for FP8 with block scales, that it serves DeepSeek with on
Xeons, and those for bf16, which take dequantised weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function, VendorFunction
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.fp8_to_fp32 import fp8_to_bf16
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import VllmCpu, vllm_operator

if TYPE_CHECKING:
    import torch

PACK = vllm_operator("convert_weight_packed", positions=1)
FP8 = vllm_operator("fp8_scaled_mm_cpu", positions=7)
BRGEMM = vllm_operator("weight_packed_linear", positions=5)
ONEDNN = Function("vllm._custom_ops.onednn_mm", positions=3)
ONEDNN_PACK = Function("vllm._custom_ops.create_onednn_mm", positions=2)


class AmxGemm(VllmCpu):
    """`fp8_scaled_mm_cpu` (SGLang's CPU kernel), of CPUFp8BlockScaledMMKernel: W8A16. Built on
    oneDNN's brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not. The engine itself picks
    it only where there are AMX tiles (vllm/model_executor/kernels/linear/scaled_mm/cpu.py, vLLM 0.32)."""

    name = "vllm.amx"
    symbols = (FP8, PACK)
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
            weights = PACK.bind(operands.b_q)()
        return _AmxGemm(operands, weights, True)


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
        return _AmxGemm(operands, operands.b_q, False)


class _AmxGemm(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(self, operands: BlockScaleGemmOperands, weights: torch.Tensor, packed: bool) -> None:
        import torch

        super().__init__(operands)
        o, self.weights = operands, weights
        blocks = [BLOCK, BLOCK]
        self.multiply = FP8.bind(o.a, weights, o.b_scale, blocks, None, torch.bfloat16, packed)

    def call(self) -> None:
        self.out = self.multiply()


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
    symbols = (ONEDNN, ONEDNN_PACK, vllm_operator("onednn_mm", positions=4))
    onednn_isa = "AVX512_CORE"

    ROWS = 32  # that vLLM has oneDNN pack for

    def prepare_turn(
        self, first: _Product | None, operands: BlockScaleGemmOperands, out: torch.Tensor | None
    ) -> Prepared:
        if first is not None and first.operands.b_q is operands.b_q:
            handler = first.packed
        else:
            weights = fp8_to_bf16(operands.b_q, operands.b_scale)
            handler = ONEDNN_PACK.bind(weights.t(), self.ROWS)()
        return _Product(operands, handler, ONEDNN.bind(handler, operands.a, None))


class BrgemmGemm(VllmDequantisedGemm):
    """`weight_packed_linear` (SGLang's CPU kernel), built on oneDNN's brgemm: vLLM's with
    VLLM_CPU_SGL_KERNEL."""

    name = "vllm.brgemm_bf16"
    symbols = (BRGEMM, PACK)
    onednn_isa = "AVX512_CORE_BF16"
    allocates = False

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        whole = sizes.n % AmxGemm.STEP == 0 and sizes.k % AmxGemm.STEP == 0
        return need(whole, f"needs n and k to be multiples of {AmxGemm.STEP}")

    def prepare_turn(
        self, first: _Product | None, operands: BlockScaleGemmOperands, out: torch.Tensor | None
    ) -> Prepared:
        assert out is not None  # it allocates none of its own
        if first is not None and first.operands.b_q is operands.b_q:
            packed = first.packed
        else:
            packed = PACK.bind(fp8_to_bf16(operands.b_q, operands.b_scale))()
        is_packed = True
        return _Product(operands, packed, BRGEMM.bind(out, operands.a, packed, None, is_packed), out)


class _Product(Prepared):
    """packed: the weights as the library keeps them; out: where the call writes, if it returns nothing"""

    operands: BlockScaleGemmOperands

    def __init__(
        self,
        operands: BlockScaleGemmOperands,
        packed: object,
        multiply: VendorFunction,
        out: torch.Tensor | None = None,
    ) -> None:
        super().__init__(operands, out)
        self.packed, self.multiply = packed, multiply
        self.returns = out is None

    def call(self) -> None:
        product = self.multiply()
        if self.returns:
            self.out = product
