"""An invented run of MLA decode on an MI300X: as many rows and cases as a GPU has. Nobody measured it."""

from dataclasses import replace
from pathlib import Path

from tests.support.written_runs import case, cell, finished, ranked, write

FACTORS = {
    "torch.sdpa": 6.0, "aiter.asm": 1.0, "aiter.asm_persistent": 1.03, "aiter.asm_persistent@sglang": 1.031,
    "aiter.ck": 1.5, "aiter.triton": 1.4, "aiter.triton_split": 1.25, "sglang.triton": 1.9,
    "tilelang.split": 2.4, "torch.compile": 9.0, "torch.naive": 40.0, "triton.split_kv": 1.2,
    "triton.grouped": 1.7, "vllm.triton": 1.8, "vllm.triton_split": 1.35,
}  # fmt: skip
"""Time of a row, as a multiple of the fastest at a large batch."""
MI300X = {
    "platform": "rocm", "arch": "gfx942", "device": "AMD Instinct MI300X", "cpus": 192, "threads": 96,
    "device_memory": 206_141_652_992, "last_level_cache": 268_435_456, "driver": "6.12",
}  # fmt: skip


def amd_run(folder: Path, rows: int = 15, cases: int = 8) -> Path:
    """rows: at most 30, those after 15 are eager launches; cases: batches by 2, then by context too"""
    of = [
        case(batch, ctx=ctx, heads=16, page=64, kv="bf16")
        for ctx in ("3201..3999", 8192, 131_072)
        for batch in (64, 128, 32, 16, 8, 4, 2, 1)
    ][:cases]
    of = [replace(one, weight=1 / cases, place="deepseek-r1 tp8 decode") for one in of]
    records = []
    for number, one in enumerate(of):
        batch = int(one.sizes["batch"])
        longer = {"3201..3999": 1.0, 8192: 2.2, 131_072: 33.0}[one.sizes["ctx"]]
        for_all = 12 + 1.1 * batch * longer
        times = {
            name: round(for_all * factor * (1 + (i * 7 + number * 5) % 11 / 60), 3)
            for i, (name, factor) in enumerate(FACTORS.items())
        }
        told = {"platform": "rocm", "arch": "gfx942", "launch": "graph"}
        records += [
            record.model_copy(update=told if record.kind == "cell" else {}) for record in ranked(one, times)
        ][:-1]
        records += [
            cell(one, name, us * 1.2 + 8, us / 50, **told | {"launch": "eager"})
            for name, us in list(times.items())[: rows - len(times)]
        ]
        records += [cell(one, f"flashinfer.{name}", None) for name in ("fa2", "fa3", "trtllm", "cutlass")]
        records += [cell(one, "aiter.gluon", None, reason="needs gfx950"), finished(one)]
    provenance = {
        "machine": MI300X, "versions": {"torch": "2.9.0+rocm7"},
        "git": {"commit": "abcdef012345", "dirty": False},
    }  # fmt: skip
    return write(
        folder, records, of, provenance=provenance, ceilings={"rates": {"bf16": 7e14}, "read": 4.3e12}
    )
