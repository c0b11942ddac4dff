"""srt/layers/moe/moe_runner/triton_utils of SGLang 0.5.23."""

from contextlib import contextmanager

from .fused_moe import fused_experts as fused_experts

_config = None


@contextmanager
def override_config(config):
    global _config
    old, _config = _config, config
    yield
    _config = old


def get_config():
    return _config
