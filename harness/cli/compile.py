"""`python -m harness compile`: every shipped configuration of the suite's Triton kernels, compiled for GPUs
that need not be here, and held against their limits."""

from __future__ import annotations

import json
import sys

import kernels
from harness.catalogue.architectures import select_architectures
from harness.compile.survey import able, compiles
from harness.errors import FAILED, OK, NothingRan
from harness.files import write
from harness.plan.select import choose_op
from harness.report.compile_table import compile_table


def show(target: str | None, op: str | None, json_to: str | None) -> int:
    """Prints a table, or JSON; gives the exit code."""
    ops = [choose_op(op).name] if op else list(kernels.OPS)
    targets = able(select_architectures(target))
    rows = compiles(ops, targets)
    if not rows:
        raise NothingRan(f"no case of {', '.join(ops)} is one that a Triton kernel takes")
    import triton

    if json_to:
        text = json.dumps({"triton": triton.__version__, "compiles": rows}, indent=1) + "\n"
        write(json_to, text)
    else:
        print(compile_table(rows))
    bad = [row for row in rows if not row["ok"]]
    for row in bad:
        what = f"{row['target']} {row['op']} {row['kernel']} {row['config']}"
        print(f"{what}: {row['reason']}", file=sys.stderr)
    print(
        f"{len(rows)} configurations compiled by Triton {triton.__version__}, {len(bad)} must not be shipped",
        file=sys.stderr,
    )
    return FAILED if bad else OK
