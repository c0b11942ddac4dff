"""hopper/flash_attn_3/__init__.py at 0251105."""

__version__ = "3.0.0"
