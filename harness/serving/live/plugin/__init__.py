"""A vLLM plug-in (entry point group `vllm.general_plugins`) that makes a running engine call this suite's
implementations.

It lives in the engine's processes, under another name and without the harness: it imports torch, vLLM, and
`kernels` with `shapes`, which the harness stages beside it (live/engine/plugin_path.py). Environment
variables say what to replace; what it replaced, and that it was called, it writes to a file.

    KERNEL_BENCH_SWAPS        `OP[:PLACE]=IMPLEMENTATION`, by comma; empty: none (see live/swaps.py)
    KERNEL_BENCH_SUITE        folder that holds `kernels` and `shapes`
    KERNEL_BENCH_SWAPS_LOG    file that a line of JSON is appended to for each thing done
    KERNEL_BENCH_ROUTING_LOG  folder for the routing log; absent: none
"""

from __future__ import annotations

import importlib
import os


def register() -> None:
    """The entry point. Called in each of vLLM's processes, perhaps more than once."""
    from . import avx512, report

    if report.already_registered():
        return
    avx512.allow()
    for name in filter(None, os.environ.get("KERNEL_BENCH_SWAPS", "").split(",")):
        site = name.partition("=")[0].partition(":")[0]
        importlib.import_module(f".{site}", __package__).apply(name)
    if os.environ.get("KERNEL_BENCH_ROUTING_LOG"):
        from . import routing

        routing.record()
