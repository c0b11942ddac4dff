"""A double of vLLM 0.33.0 (the wheel of PyPI): its CUTLASS MLA decode."""

__version__ = "0.33.0"
