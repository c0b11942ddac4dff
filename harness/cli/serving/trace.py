"""`python -m harness serving trace FILE`: a profiler's trace by op class and kernel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from harness.cli.options import OneOf, json_option, write_json
from harness.errors import FAILED, OK, UsageError

if TYPE_CHECKING:
    from harness.serving.trace.classify import Phase


@click.command("trace")
@click.argument("file", metavar="FILE")
@click.option(
    "--phase", type=OneOf(["prefill", "decode", "mixed", "training", "other"]), help="Count only these steps."
)
@click.option(
    "--top", type=click.IntRange(min=0), metavar="N", default=15, show_default=True, help="List N kernels."
)
@click.option("--partial", is_flag=True, help="Take what there is of a file that breaks off, and flag it.")
@json_option("Write everything there as JSON instead.")
def trace(file: str, phase: Phase | None, top: int, partial: bool, json_to: str | None) -> None:
    """Show where a step's time goes in a profiler's trace. FILE is a trace of torch.profiler, rocprofv3
    (JSON, or its kernel trace as CSV) or nsys stats (CSV of cuda_gpu_trace), plain or gzip. It is shown by op
    class and kernel, prefill and decode steps apart, with what overlaps and what is exposed. --json has each
    step. Exit code 1 where something in it is wrong or, with --partial, it breaks off; 2 where it cannot be
    read."""
    from harness.cli.serving.trace_display import as_json, trace_text
    from harness.report.terminal import show
    from harness.serving.trace import decompose

    decomposed = decompose(file, partial=partial)
    if phase and phase not in decomposed.phases():
        raise UsageError(f"{file} has no {phase} steps; it has: {', '.join(decomposed.phases())}")
    if json_to:
        write_json(json_to, as_json(decomposed, phase), allow_nan=False)
    else:
        show(trace_text(decomposed, phase, top), sys.stdout)
    sys.exit(FAILED if any(finding.severity == "wrong" for finding in decomposed.findings) else OK)
