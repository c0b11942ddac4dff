"""Blocks of results as serving clients print them, as runs: formats/console.toml says what each label is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness.serving.clients import trtllm
from harness.serving.clients.commands import Command, command_of, contradicts
from harness.serving.clients.console_text import Block, blocks, has_blocks
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document
from harness.serving.clients.format import STATISTIC, Format, engine, formats, units
from harness.serving.schema import ServingRun

LATENCY = re.compile(rf"({STATISTIC})(?: dev)? (.+?) \(([^()]*)\)")
WINDOW = (
    "of the window between warm-up and cool-down: `Successful requests` and input tokens count only the "
    "requests wholly inside it, output tokens all that came in it; so tokens a request and the total "
    "throughput mix two counts"
)


class Console(Format):
    """The format of a text with blocks of results, with reports of trtllm-bench, or with both."""

    def recognises(self, document: Document) -> bool:
        is_text = document.kind == "text"
        return is_text and (has_blocks(document.text) or trtllm.MARK.search(document.text) is not None)

    def runs(self, document: Document) -> list[ServingRun]:
        """Of the blocks that say anything, and of trtllm-bench's reports, in the text's order."""
        printed = list(blocks(document.text))
        after = [*(block.before for block in printed[1:]), None]
        commands = map(command_of, (block.before for block in printed), after)
        made = [_run(document, block, command) for block, command in zip(printed, commands, strict=True)]
        runs = [run for run in made if run is not None] + trtllm.reports(document)
        return sorted(runs, key=lambda run: int(run.id.rpartition(":")[2]))


def _run(document: Document, block: Block, command: Command | None) -> ServingRun | None:
    """None where the block says nothing."""
    where = f"{document.path}:{block.line}"
    unsure = {*block.conflicts, block.cut}
    row = Fields(where, {k: v for k, v in block.values.items() if k not in unsure}, as_text=True)
    for label, (first, second) in block.conflicts.items():
        row.leave_out(label, f"stands there twice, as {first} and as {second}")
    if block.cut:
        row.leave_out(block.cut, "is where the text ends and may be cut through")
    if not block.closed:
        message = "the block is broken off: its last line is missing, and what came before it may be"
        row.find("truncated", "suspect", f"{where}: {message}")
    table = formats()["console"]
    values = _values(row, table)
    if not any(values[label] is not None for label in values if label not in ("limit", "sent")):
        return None
    run = table.run(Fields(where, {"benchmark duration": None} | values, findings=row.findings))
    labels, spoken = {*row.values, "offline" if block.offline else ""}, row.text("backend")
    clients = table.more["clients"].items()
    client = next((name for name, own in clients if labels & {*own}), "vllm.serve")
    notes = [WINDOW] if client == "moai.serve" else []
    about: dict[str, Any] = {
        "client": f"{client}.console", "engine": table.more["engines"].get(client) or engine(spoken),
        "protocol": "" if block.offline else spoken, "mode": "offline" if block.offline else "online",
    }  # fmt: skip
    if command:
        more, model, more_notes = _asked(row, run, command)
        about |= {"workload": more, "model": model}
        notes += more_notes
    rest = {"notes": (*notes, *run.notes), "findings": tuple(row.findings), "extra": row.rest()}
    return run.model_copy(update=about | rest)


def _values(row: Fields, table: Format) -> dict[str, Any]:
    """The block's numbers by its labels without units, latencies by `mean_ttft_ms` and the like."""
    unit_of: dict[str, str] = {path: rule.unit for path, rule in table.metrics.items() if not rule.latencies}
    unit_of["benchmark duration"] = "s"
    latencies = {name for rule in table.metrics.values() for name in rule.latencies}
    plain = {*table.load.values(), *table.totals.values()} - {"limit", "sent", "benchmark duration"}
    values: dict[str, Any] = {}
    for key in row.values:
        label, _, unit = key.partition(" (")
        if match := LATENCY.fullmatch(key):
            if match[2] in latencies:
                values[f"{match[1]}_{match[2]}_ms"] = _scaled(row, key, match[3], units("ms"))
        elif label in unit_of:
            known: Mapping[str, float] = {"": 1.0} if unit_of[label] == "1" else units(unit_of[label])
            values[label] = _scaled(row, key, unit.rstrip(")"), known)
        elif key in plain:
            values[key] = row.number(key)
        elif key in table.more["sent"]:
            values["sent"] = row.number(key, infinite=0.0)
        elif key in table.more["limit"]:
            unlimited = str(row.take(key)).lower() in ("not set", "none")
            values["limit"] = None if unlimited else row.number(key)
    return values


def _scaled(row: Fields, key: str, unit: str, known: Mapping[str, float]) -> float | None:
    if unit in known:
        return row.number(key, scale=known[unit])
    row.take(key)
    row.leave_out(key, f"is in {unit or 'no unit'}, not in one of {', '.join(known)}")
    return None


def _asked(row: Fields, run: ServingRun, command: Command) -> tuple[Any, str, list[str]]:
    """The workload with what the command before the block asked for, unless the two disagree; the model;
    notes."""
    requested, model, note = command.workload()
    if contradiction := contradicts(requested, run.workload, run.totals.completed):
        message = f"{row.where}: the command before the block is not of it: {contradiction}"
        row.find("command", "suspect", message)
        return run.workload, "", []
    printed = {name: value for name, value in run.workload.model_dump().items() if value not in (None, "")}
    how = "the arguments printed" if command.printed else "the command"
    notes = [f"model and workload from {how} before the block", *filter(None, [note])]
    return requested.model_copy(update=printed), model, notes
