"""Which kernel a table's times are of, and whether the engine runs that one.

Tables name it in `kernel_source`, in words of their own. What an engine runs by default is known by machine
(kernels/engines). Two names are of one kernel where they share a word that tells kernels apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.serving.link.times.tables import Tables
from harness.serving.names import data_sheet
from kernels.engines import engines, entries

WORDS = {
    "triton": "triton",
    "deepgemm": "deep_?gemm",
    "trtllm": "trt_?llm|tensorrt",
    "cutlass": "cutlass",
    "cutedsl": "cute_?dsl",
    "aiter": "aiter",
    "flashmla": "flash_?mla",
    "flash_attn": "flash_?attention|flash_?attn|fa3|fa4",
}
"""What tells kernels apart -> how it is written; a wrapper such as flashinfer has kernels of several."""
TIMED: Mapping[str, tuple[str, str]] = {
    "gemm_perf": ("block_scale_gemm", "gemm_dtype"),
    "moe_perf": ("fused_moe", "moe_dtype"),
    "generation_mla_perf": ("mla_decode", ""),
}
"""By file, the op that it times, and the column that says fp8_block where its rows are of other dtypes too.
Prefill's tables time the absorbed form, which no engine runs (see tables.py)."""


def words(name: str) -> frozenset[str]:
    return frozenset(word for word, spelling in WORDS.items() if re.search(spelling, name, re.IGNORECASE))


def run_by_default(engine: str, op: str, hardware: str) -> tuple[str, ...]:
    """Rows of this suite that the engine takes on that machine where nothing is set; empty: not known."""
    arch = data_sheet(hardware).get("arch", "")
    if engine not in engines():
        return ()
    return tuple(dict.fromkeys(e.row for e in entries(engine, op, arch) if e.row and not e.flags))


def of_engine(tables: Tables, engine: str, hardware: str) -> Tables:
    """The tables without rows of kernels that the engine does not run: times of another kernel once made TPOT
    54 % wrong (SGLang's MoE on B200). Notes say what was left out, and what cannot be told."""
    rows, notes = dict(tables.rows), list(tables.notes)
    for file, (op, dtype) in TIMED.items():
        run = run_by_default(engine, op, hardware)

        def is_of_op(row: Mapping[str, Any], dtype: str = dtype) -> bool:
            return not dtype or row[dtype] == "fp8_block"

        by_source = Counter(row["kernel_source"] for row in rows.get(file, ()) if is_of_op(row))
        wanted = frozenset[str]().union(*map(words, run))
        if not wanted:
            if by_source:
                notes.append(f"which kernel {engine} runs of {op} is not known: that of the tables is taken")
            continue
        # A name that tells nothing may be of any kernel, but vouches for none beside those of another.
        unfit = {source for source in by_source if words(source) and not words(source) & wanted}
        if not unfit:
            continue
        if not any(words(source) & wanted for source in by_source):
            unfit = set(by_source)
        rows[file] = [row for row in rows[file] if not is_of_op(row) or row["kernel_source"] not in unfit]
        left_out = sum(by_source[source] for source in unfit)
        notes.append(
            f"{left_out} of {by_source.total()} times of {op} are of {', '.join(sorted(unfit))}, the "
            f"engine runs {' or '.join(run)}: left out"
        )
    return replace(tables, rows=rows, notes=tuple(notes))
