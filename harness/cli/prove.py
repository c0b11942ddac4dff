"""`python -m harness prove`: right kernels, wrong ones and cheats put to the check."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import json_option, target_device

if TYPE_CHECKING:
    from harness.prove.cheat_runs import CheatRow
    from harness.prove.execute import Proof


@click.command()
@click.option("--op", help="Only this op.")
@click.option("--size", default="", help="The only size of the catalogue that is judged.")
@click.option("--seeds", default=1, show_default=True, help="So many seeds of operands.")
@click.option("--cheats", is_flag=True, help="Cheats instead, in real runs on the device.")
@target_device
@json_option("Write JSON there instead of a table.")
def prove(
    op: str | None, size: str, seeds: int, cheats: bool, device: str | None, json_to: str | None
) -> None:
    """Does the check catch planted bugs, and accept right kernels of other arithmetic?

    Each kernel of the op's catalogue (harness/prove) computes in plain torch on the CPU, on ordinary and on
    adversarial operands, and is judged as a run judges. Cheats are right kernels whose calls take a short
    cut: --cheats measures them beside the right one. Exit code 1 where a bug or a cheat is missed or a right
    kernel is refused.
    """
    import json
    import sys

    from harness.errors import FAILED, UsageError
    from harness.files import write
    from harness.machine.device import choose_device
    from harness.plan.select import choose_op
    from harness.prove.cheat_runs import CHEATED, cheat
    from harness.prove.execute import CATALOGUES, catalogue, prove
    from harness.report.terminal import show

    ops = [choose_op(op).name] if op else [*(CHEATED if cheats else CATALOGUES)]
    sizes = dict.fromkeys(s for each in ops for s in (CHEATED[each] if cheats else catalogue(each).SIZES))
    if size and size not in sizes:
        raise UsageError(f"no size {size!r}; sizes: {', '.join(map(repr, sizes))}")
    if device:
        choose_device(device)  # raises where there is no such device
    rows: list[dict[str, Any]]
    if cheats:
        cheated: list[CheatRow] = []
        for each in ops:
            cheat(each, cheated.append, device, size)
        rows = [
            {"op": r.op, "name": r.name, "size": r.size, "status": r.status, "reason": r.reason}
            for r in cheated
        ]
        text, fine = _cheats(cheated), all(r.as_it_should for r in cheated)
    else:
        proofs: list[Proof] = []
        for each in ops:
            prove(each, range(seeds), proofs.append, size=size)
        rows = [
            {"op": p.op, "name": p.planted.name, "right": p.planted.right, "size": p.size, "seed": p.seed,
             "over": p.over, "refused": p.refused, "fine": p.planted.fine, "source": p.planted.source}
            for p in proofs
        ]  # fmt: skip
        text, fine = _catalogue(proofs), all(p.as_it_should for p in proofs)
    if json_to:
        write(json_to, json.dumps(rows, indent=1) + "\n")
    else:
        show(text, sys.stdout)
    if not fine:
        sys.exit(FAILED)


def _catalogue(proofs: Sequence[Proof]) -> str:
    from tabulate import tabulate

    rows = []
    for (op, size), group in groupby(proofs, lambda p: (p.op, p.size)):
        here = list(group)
        right = [p for p in here if p.planted.right]
        bugs = [p for p in here if not p.planted.right and not p.planted.fine]
        fine = [p for p in here if p.planted.fine]
        worst = max((p.over for p in right), default=0.0)
        rows.append(
            [op, size, f"{sum(not p.refused for p in right)} of {len(right)}", f"{worst:.2f}",
             f"{sum(p.refused for p in bugs)} of {len(bugs)}", len(fine)]
        )  # fmt: skip
    heads = ["op", "size", "right, accepted", "worst over limit", "bugs, caught", "within rounding"]
    lines = [tabulate(rows, heads)]
    for p in proofs:
        if not p.as_it_should:
            what = "refused though right" if p.planted.right else "missed"
            where = f"{p.op}, {p.size}, seed {p.seed}"
            lines.append(f"{what}: {p.planted.name} ({where}): {p.over:.3g} of the limit")
    return "\n".join(lines)


def _cheats(rows: Sequence[CheatRow]) -> str:
    from tabulate import tabulate

    table = []
    for (op, size), group in groupby(rows, lambda r: (r.op, r.size)):
        here = list(group)
        cheats = [r for r in here if r.cheats]
        right = [r for r in here if not r.cheats]
        table.append(
            [op, size, f"{sum(r.as_it_should for r in cheats)} of {len(cheats)}",
             f"{sum(r.as_it_should for r in right)} of {len(right)}"]
        )  # fmt: skip
    lines = [tabulate(table, ["op", "size", "cheats, caught", "right, accepted"])]
    lines += [f"{r.op} {r.name} ({r.size}) is {r.status}: {r.reason}" for r in rows if not r.as_it_should]
    return "\n".join(lines)
