"""Double of vLLM 0.33.0's CUDA wheel: FlashAttention 3 and 4 and FlashMLA as it bundles them."""

__version__ = "0.33.0"
