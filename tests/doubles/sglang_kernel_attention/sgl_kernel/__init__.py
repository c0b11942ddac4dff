"""Double of sglang-kernel 0.4.10: FlashAttention 3 as SGLang 0.5.23 imports it."""

__version__ = "0.4.10"
