"""Double of NVIDIA/cudnn-frontend 1.23.0 (2026-05) over cuDNN 9.19: graphs of one `sdpa` or `sdpa_fp8` node.

Not doubled: cudnn.Graph, cudnn.graph, cudnn.jit, the execution of chosen plans, serialisation.
"""

from cudnn._compiled_module import (
    attention_implementation,
    build_plan_policy,
    cudnnGraphNotSupportedError,
    data_type,
    diagonal_alignment,
    heur_mode,
    tensor,
)
from cudnn._pygraph import pygraph

__all__ = [
    "attention_implementation",
    "build_plan_policy",
    "cudnnGraphNotSupportedError",
    "data_type",
    "diagonal_alignment",
    "heur_mode",
    "pygraph",
    "tensor",
]

__version__ = "1.23.0"  # python/cudnn/__init__.py:56


def backend_version():
    return 91900


def backend_version_string():
    return "9.19.0"


class _Handle:
    stream = 0


def create_handle():
    return _Handle()


def destroy_handle(handle):
    del handle.stream


def set_stream(handle, stream):
    handle.stream = stream


def get_stream(handle):
    return handle.stream
