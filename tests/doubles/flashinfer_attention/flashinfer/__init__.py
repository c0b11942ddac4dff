"""Double of flashinfer-ai/flashinfer 0.6.18 (fb28d72, 2026-08-22): MLA decoding and ragged prefill alone."""

import contextlib

from flashinfer import cudnn as cudnn
from flashinfer import mla as mla
from flashinfer import prefill as prefill
from flashinfer.mla import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper

__version__ = "0.6.18"


@contextlib.contextmanager
def autotune(tune_mode: bool = True, cache: str | None = None):
    """autotuner.py: within it calls measure what they may choose from."""
    yield
