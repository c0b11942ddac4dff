"""Which kernel a table's times are of, and whether the engine runs that one.

Tables name it in `kernel_source`, in words of their own. What an engine runs by default is known by machine
(kernels/engines). Two names are of one kernel where they share a word that tells kernels apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

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


def of_engine(tables: Tables, engine: str, hardware: str) -> Tables:
    """The tables without rows of kernels that the engine does not run: times of another kernel once made TPOT
    54 % wrong (SGLang's MoE on B200). Notes say what was left out, and what cannot be told."""
    rows, notes, arch = dict(tables.rows), list(tables.notes), data_sheet(hardware).get("arch", "")
    for file, (op, dtype) in TIMED.items():
        known = entries(engine, op, arch) if engine in engines() else ()
        run = dict.fromkeys(entry.row for entry in known if entry.row and not entry.flags)
        of_op = [row for row in rows.get(file, ()) if not dtype or row[dtype] == "fp8_block"]
        by_source = Counter(row["kernel_source"] for row in of_op)
        wanted = frozenset[str]().union(*map(words, run))
        if not wanted:
            if by_source:
                notes.append(f"which kernel {engine} runs of {op} is not known: that of the tables is taken")
            continue
        # A name without such a word may be of any kernel. It is taken only where no row names another one.
        unfit = {source for source in by_source if words(source) and not words(source) & wanted}
        if not unfit:
            continue
        if not any(words(source) & wanted for source in by_source):
            unfit = set(by_source)
        left_out = {id(row) for row in of_op if row["kernel_source"] in unfit}
        rows[file] = [row for row in rows[file] if id(row) not in left_out]
        notes.append(
            f"{len(left_out)} of {len(of_op)} times of {op} are of {', '.join(sorted(unfit))}, the "
            f"engine runs {' or '.join(run)}: left out"
        )
    return replace(tables, rows=rows, notes=tuple(notes))
