"""vLLM's Triton kernel for MLA decode, what it serves DeepSeek with where a GPU has no kernel of its own.

Sources: v1/attention/ops/triton_decode_attention.py and v1/attention/backends/mla/triton_mla.py of vLLM 0.32
and 0.33. Its CPU build switches Triton off, interpreted too. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.mla_decode.compute_units import MOST_UNITS, compute_units
from kernels.mla_decode.layouts import one_head
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, MlaDecodeSizes
from kernels.op import Prepared, Unsupported
from kernels.vendor import Vllm

if TYPE_CHECKING:
    import torch

# triton_mla.py, _compute_num_kv_splits.
MIN_WORK_PER_SPLIT = 512
SPLITS_PER_UNIT = 2


ARGUMENTS = "q k_buffer v_buffer o req_to_token b_seq_len attn_logits num_kv_splits sm_scale page_size"
SCALES = "k_scale v_scale"

DECODE = Function(
    "vllm.v1.attention.ops.triton_decode_attention.decode_attention_fwd",
    "vllm.attention.ops.triton_decode_attention.decode_attention_fwd",
    needs=ARGUMENTS,
    wishes=f"lse is_mla {SCALES}",
)


class VllmTritonMlaDecode(Vllm):
    """`decode_attention_fwd`: split-KV in two kernels, into as many parts as vLLM records into its graphs,
    which is for the server's context length. An FP8 cache is dequantised to bf16 on the way."""

    name = "vllm.triton"
    requires = "vLLM for cuda or rocm (read at 0.33; older ones as far as their signature agrees)"
    any_fp8 = True
    symbols = (DECODE,)

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return workspace(sizes, sizes.model_len)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        if operands.kv.element_size() == 1 and not DECODE.takes("k_scale"):
            raise Unsupported(f"vllm {self.version} has no scales for an FP8 cache")
        return VllmSplitKv(operands, out, DECODE, operands.sizes.model_len)


class VllmSplitKv(Prepared):
    """`decode_attention_fwd` of vLLM, or of a library that took it over, with the splits of a sequence of
    `longest` tokens."""

    def __init__(
        self, operands: MlaDecodeOperands, out: torch.Tensor, function: Function, longest: int
    ) -> None:
        import torch

        super().__init__(operands, out)
        batch, heads = operands.q.shape[:2]
        splits = splits_for(longest, compute_units(operands.q.device))
        partial = torch.empty(batch, heads, splits, LATENT + 1, dtype=torch.float32, device=operands.q.device)
        cache = one_head(operands.kv)
        self.decode = function.bind(
            q=operands.q,
            k_buffer=cache,
            v_buffer=cache[..., :LATENT],
            o=out,
            req_to_token=operands.page_table,
            b_seq_len=operands.lengths,
            attn_logits=partial,
            num_kv_splits=splits,
            sm_scale=operands.scale,
            page_size=operands.page,
            **scales(operands),
            lse=operands.q.new_empty(batch, heads),
            is_mla=True,
        )

    def call(self) -> None:
        self.decode()


def workspace(sizes: MlaDecodeSizes, longest: int) -> int:
    """Partial results, fp32, as many as the largest device would split into."""
    return sizes.batch * sizes.heads * splits_for(longest, MOST_UNITS) * (LATENT + 1) * 4


def splits_for(longest: int, units: int) -> int:
    """vLLM's choice: a power of two, or what fills the device."""
    ideal = 1 << (max(1, longest // MIN_WORK_PER_SPLIT) - 1).bit_length()
    return min(ideal, units * SPLITS_PER_UNIT)


def scales(operands: MlaDecodeOperands) -> dict[str, torch.Tensor]:
    """fp32, of no dimension, on the device. A call without them makes some of its own each time."""
    import torch

    scale = torch.tensor(operands.kv_scale, dtype=torch.float32, device=operands.q.device)
    return {"k_scale": scale, "v_scale": scale}
