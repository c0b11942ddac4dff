"""`python -m harness prove`: right and wrong kernels put to the check."""

from __future__ import annotations

import click

from harness.cli.options import json_option


@click.command()
@click.option("--op", required=True, help="The op whose catalogue is judged.")
@click.option("--size", default="", help="The only size of the catalogue that is judged.")
@click.option("--seeds", default=1, show_default=True, help="So many seeds of operands.")
@json_option("Write JSON there instead of a table.")
def prove(op: str, size: str, seeds: int, json_to: str | None) -> None:
    """Does the check catch planted bugs, and accept right kernels of other arithmetic?

    Each kernel of the op's catalogue (harness/prove) computes in plain torch, on ordinary and on adversarial
    operands, and is judged as a run judges. Exit code 1 where a bug is missed or a right kernel is refused.
    """
    import json
    import sys

    from harness.errors import FAILED
    from harness.files import write
    from harness.plan.select import choose_op
    from harness.prove.execute import Proof, prove
    from harness.report.terminal import show

    proofs: list[Proof] = []
    prove(choose_op(op).name, range(seeds), proofs.append, size=size)
    if json_to:
        rows = [
            {"name": p.planted.name, "right": p.planted.right, "size": p.size, "seed": p.seed, "over": p.over,
             "found": p.found, "fine": p.planted.fine, "source": p.planted.source}
            for p in proofs
        ]  # fmt: skip
        write(json_to, json.dumps(rows, indent=1) + "\n")
    else:
        show(_table(proofs), sys.stdout)
    if not all(p.as_it_should for p in proofs):
        sys.exit(FAILED)


def _table(proofs: list) -> str:  # type: ignore[type-arg]
    from tabulate import tabulate

    rows = []
    for size in dict.fromkeys(p.size for p in proofs):
        here = [p for p in proofs if p.size == size]
        right = [p for p in here if p.planted.right]
        bugs = [p for p in here if not p.planted.right and not p.planted.fine]
        fine = [p for p in here if p.planted.fine]
        worst = max((p.over for p in right), default=0.0)
        rows.append(
            [size, f"{sum(not p.found for p in right)} of {len(right)}", f"{worst:.2f}",
             f"{sum(p.found for p in bugs)} of {len(bugs)}", len(fine)]
        )  # fmt: skip
    heads = ["size", "right, accepted", "worst over limit", "bugs, caught", "within rounding"]
    lines = [tabulate(rows, heads)]
    for p in proofs:
        if not p.as_it_should:
            what = "refused though right" if p.planted.right else "missed"
            lines.append(f"{what}: {p.planted.name} ({p.size}, seed {p.seed}): {p.over:.3g} of the limit")
    return "\n".join(lines)
