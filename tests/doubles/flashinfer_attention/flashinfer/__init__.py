"""Double of flashinfer-ai/flashinfer 0.6.18 (fb28d72, 2026-08-22): MLA decoding and ragged prefill alone."""

from flashinfer import cudnn as cudnn
from flashinfer import mla as mla
from flashinfer import prefill as prefill
from flashinfer.mla import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper

__version__ = "0.6.18"
