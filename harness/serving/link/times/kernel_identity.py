"""Which kernel a table's times are of, and whether the engine runs that one.

Tables name it in `kernel_source`, in words of their own. What an engine runs by default is known by machine
(kernels/engines). Two names are of one kernel where they share a word that tells kernels apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.catalogue.devices import known_devices
from harness.serving.link.times.tables import Tables
from harness.serving.names import hardware_name
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
    "mla_generation_module_perf": ("mla_decode", ""),
}
"""By file, the op that it times, and the column that says fp8_block where its rows are of other dtypes too.
Prefill's tables time the absorbed form, which no engine runs (see tables.py)."""

OFF_BY = 0.54
"""What a prediction from times of another kernel was off by: the mean error of TPOT at 11 points of
InferenceX for SGLang on B200 at TP8, by AIConfigurator's tables of Triton's MoE in place of FlashInfer's."""
WIDER = math.log(1 + OFF_BY) / 1.645
"""The same as a deviation of the logarithm, of which it is the end of the 90 % interval."""


@dataclass(frozen=True)
class OtherKernel:
    """timed: `kernel_source` of the table's rows; run: rows of this suite that the engine runs there"""

    op: str
    timed: tuple[str, ...]
    run: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op} is timed as {', '.join(self.timed)}, the engine runs {' or '.join(self.run)}"


def words(name: str) -> frozenset[str]:
    return frozenset(word for word, spelling in WORDS.items() if re.search(spelling, name, re.IGNORECASE))


def run_by_default(engine: str, op: str, hardware: str) -> tuple[str, ...]:
    """Rows of this suite that the engine takes on that machine where nothing is set; empty: not known."""
    arch = next((d["arch"] for d in known_devices() if hardware_name(d["name"]) == hardware), "")
    if engine not in engines():
        return ()
    return tuple(dict.fromkeys(e.row for e in entries(engine, op, arch) if e.row and not e.flags))


def of_engine(tables: Tables, engine: str, hardware: str) -> tuple[Tables, list[OtherKernel]]:
    """The tables without rows of kernels that the engine does not run, where they have those of one that it
    does; and the ops of which they have none."""
    others, rows = [], dict(tables.rows)
    for file, (op, dtype) in TIMED.items():
        run = run_by_default(engine, op, hardware)

        def is_of_op(row: Mapping[str, Any], dtype: str = dtype) -> bool:
            return not dtype or row[dtype] == "fp8_block"

        # A name that tells nothing may be of any kernel.
        sources = dict.fromkeys(row["kernel_source"] for row in rows.get(file, ()) if is_of_op(row))
        by_source = {source: words(source) for source in sources}
        wanted = frozenset[str]().union(*map(words, run))
        if not wanted or not all(by_source.values()):
            continue
        fitting = {source for source, names in by_source.items() if names & wanted}
        if not fitting and by_source:
            others.append(OtherKernel(op, tuple(by_source), run))
        elif len(fitting) < len(by_source):
            unfit = by_source.keys() - fitting
            rows[file] = [row for row in rows[file] if not is_of_op(row) or row["kernel_source"] not in unfit]
    return replace(tables, rows=rows), others
