"""`python -m harness serving compare A B`: two serving results side by side, if they are alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from harness.cli.options import answer, json_option
from harness.errors import FAILED, OK, UsageError
from harness.files import require_writable


@click.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--metric",
    metavar="NAME[:WHICH]",
    help="Compare this: `throughput:output`, `tpot:median` ...  [default: throughput, or the first of both]",
)
@click.option(
    "--engine",
    multiple=True,
    metavar="[A=|B=]NAME",
    help="Name the engine that answered, where a file does not say it, or says it wrong.",
)
@click.option(
    "--assume",
    multiple=True,
    metavar="NAME",
    help="Take this to be alike where a result does not say it: hardware, engine, model, ..., all.",
)
@click.option(
    "--despite",
    multiple=True,
    metavar="NAME",
    help="Compare although this differs: speculative decoding, prefix caching, precision, KV cache.",
)
@json_option("Write JSON there instead of text.")
def compare(a: str, b: str, metric: str | None, json_to: str | None, **told: tuple[str, ...]) -> None:
    """Compare two serving results, if they are alike. A and B: FILE, FILE:ROW, or the id of a published run
    (dstack.online:2). Throughput is normalised to one GPU and to output tokens; what else differs refuses the
    comparison, with every reason, or is named beside it. Exit code 0: compared, 1: not alike."""
    from dataclasses import asdict

    from harness.serving.clients.load import beside_each_other
    from harness.serving.compare.alike import compare as compare_quantities
    from harness.serving.compare.alike import comparison_text, default_metric, find, quantity_of
    from harness.serving.compare.identity import FIELDS, SERVER, require_names, with_engine

    require_writable(json_to, None)
    require_names("--assume", told["assume"], ("all", *FIELDS))
    require_names("--despite", told["despite"], SERVER)
    engines = engines_of(told["engine"])
    left, right = beside_each_other([with_engine(find(a), engines["A"]), with_engine(find(b), engines["B"])])
    wanted = metric or default_metric(left, right)
    quantities = quantity_of(left, a, wanted), quantity_of(right, b, wanted)
    comparison = compare_quantities(*quantities, told["assume"], told["despite"])
    answer(json_to, asdict(comparison), lambda: comparison_text(*quantities, comparison))
    sys.exit(OK if comparison.verdict != "refused" else FAILED)


def engines_of(options: Sequence[str]) -> dict[str, str]:
    """The engines of A and B by `NAME`, `A=NAME` or `B=NAME`; empty where none is. Raises UsageError."""
    from harness.serving.names import known_engine

    engines = {"A": "", "B": ""}
    for option in options:
        side, _, name = option.rpartition("=")
        if side not in ("", "A", "B") or name[:2] in ("A:", "B:"):
            raise UsageError(f"cannot read --engine {option!r}; write NAME, A=NAME or B=NAME")
        engines |= dict.fromkeys([side] if side else engines, known_engine(name))
    return engines
