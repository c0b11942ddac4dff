"""A vLLM plug-in (entry point group `vllm.general_plugins`) that replaces single ops of a running engine.

It lives in the engine's processes, under another name and without the rest of this project: it imports torch
and vLLM alone. The harness puts it on the engine's path (live/engine/plugin_path.py) and says by
environment what to replace; what it replaced, and that it was called, it writes to a file.

    KERNEL_BENCH_SWAPS        names of swaps, by comma; empty: none
    KERNEL_BENCH_SWAPS_LOG    file that a line of JSON is appended to for each thing done
    KERNEL_BENCH_ROUTING_LOG  folder for the routing log; absent: none
"""

from __future__ import annotations

import os


def register() -> None:
    """The entry point. Called in each of vLLM's processes, perhaps more than once."""
    from . import avx512, catalogue, report

    if report.already_registered():
        return
    avx512.allow()
    for name in filter(None, os.environ.get("KERNEL_BENCH_SWAPS", "").split(",")):
        catalogue.apply(name)
    if os.environ.get("KERNEL_BENCH_ROUTING_LOG"):
        from . import routing

        routing.record()
