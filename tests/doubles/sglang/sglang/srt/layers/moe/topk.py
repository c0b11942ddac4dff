"""srt/layers/moe/topk.py of SGLang 0.5.23, line 363."""

from typing import NamedTuple

import torch


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor
