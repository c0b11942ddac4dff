"""`python -m harness serving ...`. Imports nothing heavy."""

from __future__ import annotations

import sys
from typing import Any

import click


@click.group()
def serving() -> None:
    """What a kernel is worth in a serving run: results, traces, the model and the ledger.

    \b
    python -m harness serving load FILE...       any client's results, in one schema, with what does not hold
    python -m harness serving link               TPOT, TTFT, throughput from kernel times; a kernel's worth
    """


@serving.command("load")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
@click.option("--csv", "csv_to", metavar="FILE|-", help="Write one line for each metric there.")
def load_command(**options: Any) -> None:
    """Results of serving clients in one schema, each row held to what must hold between its numbers. Exit
    code 1 where something does not hold, 2 where a file cannot be read."""
    from harness.serving.load_command import show

    sys.exit(show(**options))


@serving.command("link")
@click.option("--hardware", default="h200", show_default=True, help="The machine, as its tables are named.")
@click.option("--engine", default="sglang", show_default=True)
@click.option("--tp", default=8, show_default=True, help="Tensor parallelism.")
@click.option("--ep", default=1, show_default=True, help="Expert parallelism, 1 or as --tp.")
@click.option("--dp-attention", is_flag=True, help="Refused so far, with the reason.")
@click.option("--isl", default=1024, show_default=True, help="Input tokens of a request, at most.")
@click.option("--osl", default=1024, show_default=True, help="Output tokens of a request, at most.")
@click.option("--concurrency", default="4,8,16,32,64", show_default=True, metavar="N,N...")
@click.option(
    "--range-ratio",
    default=0.8,
    show_default=True,
    help="Lengths are uniform from this times to 1 times; 1: all alike, then requests stay in step.",
)
@click.option(
    "--prefill-tokens", default=8192, show_default=True, help="Of one step: --chunked-prefill-size."
)
@click.option(
    "--waves", default=10, show_default=True, help="Prompts for each place; the first come all at once."
)
@click.option("--tables", metavar="DIR", help="Per-op times in AIConfigurator's files and columns.")
@click.option("--runs", multiple=True, metavar="RUN", help="Runs of this suite: their times come first.")
@click.option("--trace", metavar="FILE", help="A profiler's trace, for what is on the critical path.")
@click.option("--kv-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option(
    "--launch",
    type=click.Choice(["graph", "eager"]),
    default="graph",
    show_default=True,
    help="How decode steps are launched.",
)
@click.option(
    "--what-if",
    multiple=True,
    metavar="OP[:PART]=FACTORx",
    help="mla_decode=2.0x, fused_moe=1.3x(1.2..1.4), block_scale_gemm:qkv_a@decode=saved:5us; all together.",
)
@click.option("--target-tpot", metavar="MS", help="Which speedups it would need: 20ms.")
@click.option("--observed", metavar="BEFORE..AFTER", help="Bounds without a model: 53.19ms..28.37ms.")
@click.option("--validate", is_flag=True, help="Hold the model against what was measured.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of tables.")
def link_command(**options: Any) -> None:
    """TPOT, TTFT and throughput of DeepSeek-R1 from the times of its kernels, and what a change of a kernel
    is worth, with 90 % intervals. Exit code 1 where --validate finds a mean error over 8 %."""
    from harness.serving.link_command import show

    sys.exit(show(**options))
