"""flashinfer/mla/__init__.py: everything of `_core`."""

from flashinfer.mla._core import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
from flashinfer.mla._trtllm import (
    trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla,
)
