"""`python -m harness shapes from FILE...`: cases of the ops from what engines and clients wrote."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

import click

from harness.cli.engine import deployment
from harness.cli.options import Command, parsed_by, write_json

if TYPE_CHECKING:
    from shapes.models import ModelConfig


def _require_from(word: str) -> None:
    """Raises ValueError unless the first word after `shapes` is `from`."""
    if word != "from":
        raise ValueError(f"write `shapes from FILE...`, not `shapes {word}`")


@click.command(cls=Command)
@click.argument("word", metavar="from", callback=parsed_by(_require_from), expose_value=False)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--out", metavar="FILE", default="cases.json", show_default=True,
              help="Write the cases there.")  # fmt: skip
@deployment
def shapes(
    files: tuple[str, ...], out: str, model: ModelConfig, tp: int, ep: int, dp_attention: bool, kv: str,
    drafts: int | None,
) -> None:  # fmt: skip
    """Make cases with weights from traffic. Other commands take them with --cases. It reads traces of
    torch.profiler (step annotations of vLLM, SGLang and ATOM, `Input Dims`, names of kernels), logs of vLLM,
    SGLang and AITER, results of serving clients, and FlashInfer-Bench's workloads. Logs and traces are taken
    as those of one DP rank. Printed is what was read, and what was left out and why."""
    from harness.errors import UsageError
    from harness.files import require_writable
    from harness.report.notes import printed_notes
    from harness.report.terminal import show
    from harness.traffic.read import read_files
    from harness.traffic.steps import Traffic, cases_of, lines, record
    from shapes.attention import Parallel
    from shapes.deployment import Deployment

    if not out.endswith(".json"):
        raise UsageError(f"--out {out}: a file of cases is NAME.json")
    require_writable(out, None)
    ranks, groups = (1, tp) if dp_attention else (tp, 1)  # the ranks of a DP group; the DP groups
    parallel, dispatched = Parallel(ranks, groups, ep), ep > 1 and groups > 1
    served = Deployment(model, parallel, dense_tp=ranks, shared_tp=ranks, dispatched=dispatched, kv=kv)
    traffic = Traffic(drafts=drafts, dp=groups)
    read_files(files, traffic)
    try:
        cases = cases_of(traffic, served)
    except ValueError as error:
        raise UsageError(str(error)) from None
    write_json(out, record(traffic, served, cases))
    counts = Counter(case.op for case in cases)
    notes = [
        *lines(traffic),
        ("deployment", f"{served.text}; --model, --tp, --ep, --dp-attention and --kv say another"),
        ("cases", ", ".join(f"{op} {count}" for op, count in counts.items())),
    ]
    if traffic.steps:
        notes.append(("steps", str(traffic.step_count())))
    show(printed_notes([*notes, ("written", out)]), sys.stdout)
