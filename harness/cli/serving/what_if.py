"""`python -m harness serving what-if`: what a faster kernel is worth in TPOT, TTFT and throughput."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import json_option
from harness.cli.serving.predict import loads_of, model_of, of_system
from harness.errors import UsageError
from harness.files import require_writable, write

if TYPE_CHECKING:
    from harness.serving.link.model import Link
    from harness.serving.link.predictions import Outlook

TIME = re.compile(r"([0-9]*\.?[0-9]+)(ms|s|us)?")


@click.command("what-if")
@click.argument("changes", nargs=-1, metavar="[OP[:PART]=FACTORx...]")
@of_system
@click.option("--target-tpot", metavar="MS", help="Also: which speedup of each op reaches it.")
@click.option(
    "--ledger", metavar="FILE", help="Add the predictions to this ledger; `observe` adds what was seen."
)
@json_option("Write JSON there instead of tables.")
def what_if(
    changes: tuple[str, ...],
    target_tpot: str | None,
    ledger: str | None,
    json_to: str | None,
    **options: Any,
) -> None:
    """What changes of kernels are worth, all together: mla_decode=2.0x, fused_moe=1.3x(1.2..1.4) with its
    90 % interval, block_scale_gemm:qkv_a@decode=saved:5us of each call. And the most that each op could
    give."""
    from harness.serving.link.predictions import parse_change

    require_writable(json_to, None)
    parsed = [parse_change(text) for text in changes]
    if ledger and not parsed:
        raise UsageError("--ledger takes predictions of changes: name one, as mla_decode=2.0x")
    target = _milliseconds(target_tpot) if target_tpot else None
    loads = loads_of(options["lengths"], options["concurrency"])
    model = model_of(options)
    from harness.serving.link.predictions import needs, outlook, predict
    from harness.serving.link.report import as_json, what_if_text

    looks = [
        replace(outlook(model, load), changes=predict(model, load, parsed) if parsed else (),
                needs=needs(model, load, target))
        for load in loads
    ]  # fmt: skip
    if ledger:
        _record(Path(ledger), model, changes, looks, options)
    if json_to:
        write(json_to, as_json(model, looks, changes, target))
    else:
        print(what_if_text(model, looks, changes, target))


def _milliseconds(text: str) -> float:
    match = TIME.fullmatch(text.strip())
    if not match or float(match[1]) <= 0:
        raise UsageError(f"cannot read --target-tpot {text!r}; write 20ms")
    return float(match[1]) * {"s": 1e3, "us": 1e-3}.get(match[2] or "ms", 1.0)


def _record(
    ledger: Path, model: Link, changes: tuple[str, ...], looks: list[Outlook], options: dict[str, Any]
) -> None:
    """Adds a row for each load, named after the system, the load and the changes. Raises UsageError where the
    ledger has one of that name."""
    from harness.serving.ledger.ledger import ChangeEntry, PredictionEntry, append
    from harness.serving.link.predictions import parse_change, setting_of

    entries: list[ChangeEntry | PredictionEntry] = []
    for look in looks:
        setting = setting_of(model, look.load)
        row = (
            f"{model.system.hardware} {model.system.engine} {setting.note} {options['lengths']} "
            f"c{look.load.concurrency}: {', '.join(changes)}"
        )
        entries.append(ChangeEntry(row=row, changes=tuple(map(parse_change, changes)), setting=setting))
        command = _command(changes, options, look.load.concurrency)
        entries += [PredictionEntry(row=row, prediction=each, command=command) for each in look.changes]
    append(ledger, *entries)


def _command(changes: tuple[str, ...], options: dict[str, Any], concurrency: int) -> str:
    """That prints the predictions of one load again."""
    words = ["python", "-m", "harness", "serving", "what-if", *changes]
    for name, value in options.items():
        for each in value if isinstance(value, tuple) else [value]:
            given = f"{concurrency}" if name == "concurrency" else each
            words += [f"--{name.replace('_', '-')}", given] if given else []
    return shlex.join(words)
