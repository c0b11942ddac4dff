"""The batched products that kv_b becomes in decode, on weights laid out as the product reads them."""

from __future__ import annotations

import torch

from . import report


def apply(swap: str) -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    process = MLAAttention.process_weights_after_loading

    def process_weights_after_loading(self, act_dtype):
        process(self, act_dtype)
        for name in ("W_UV", "W_UK_T"):
            weight = getattr(self, name, None)
            if weight is not None and not weight.is_contiguous():
                setattr(self, name, torch.nn.Parameter(weight.data.contiguous(), requires_grad=False))
                report.note("replaced", swap=swap, layer=self.layer_name)
                report.called(swap)  # the op itself is the same; its operand is not

    MLAAttention.process_weights_after_loading = process_weights_after_loading
