"""Double of SGLang 0.5.23: its face of FlashMLA, which needs the double of sgl-flash-mla beside it."""

__version__ = "0.5.23"
