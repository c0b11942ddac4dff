"""Result blocks that serving clients print, as runs. formats/console.toml tells the meaning of each label.

The load is also read from the command line before a block, if it is clear which block a command belongs to.
vLLM's and SGLang's clients print their arguments (`Namespace(...)`) in the same run. A command that a user
typed counts if it is the only one before its block and the next block has one of its own. It must not
contradict the block.

For lengths, vLLM's `bench serve` draws from [L (1 - r), L (1 + r)] with r below 1, so that their mean is L.
SGLang's client draws from [L r, L]. In both r is 0 unless given. benchmark_serving.py had both meanings in
its time, so its lengths are known only for r = 1, which only the second meaning allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from harness.serving.clients import trtllm
from harness.serving.clients.console_text import HEADER, Block, blocks, unprefixed
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document
from harness.serving.clients.format import STATISTIC, Format, engine, formats, mean_length, read_table, units
from harness.serving.clients.sglang import without_secrets
from harness.serving.schema import OfferedLoad, ServingRun

LATENCY = re.compile(rf"({STATISTIC})(?: dev)? (.+?) \(([^()]*)\)")
OPTION = re.compile(r"""--([\w-]+)(?:[= ]\s*(?!--)("[^"]*"|'[^']*'|[^\s`]+))?""")
NAMESPACE = re.compile(r"\bNamespace\((\w+=.*)\)\s*$")
ARGUMENT = re.compile(r"""(\w+)=('[^']*'|"[^"]*"|[\w.+-]+)(?=,|$)""")
# A shell operator after a command (an even number of quotes follows, so it is in none), or a comment.
SHELL_END = re.compile(r"""\s(?:[|;&]|\d?>)(?=[^"']*(?:["'][^"']*["'][^"']*)*$).*|\s#.*""")
TOLERANCE = 1e-2  # blocks print rates with two decimals


class Console(Format):
    """The format of a text with result blocks, with reports of trtllm-bench, or with both."""

    def recognises(self, document: Document) -> bool:
        if document.kind != "text":
            return False
        return bool(HEADER.search(document.text) or trtllm.MARK.search(document.text))

    def runs(self, document: Document) -> list[ServingRun]:
        """The runs of blocks that have numbers, and of trtllm-bench's reports, in the text's order."""
        runs = trtllm.reports(document)
        result_blocks = list(blocks(document.text))
        for block, following in zip_longest(result_blocks, result_blocks[1:]):
            if run := _run(self, document, block, command_of(block, following)):
                runs.append(run)
        return sorted(runs, key=lambda run: int(run.id.rpartition(":")[2]))  # by line


def _run(console: Format, document: Document, block: Block, command: Command | None) -> ServingRun | None:
    """The run of a block; None if the block has no numbers."""
    where = f"{document.path}:{block.line}"
    unsure = (*block.conflicts, block.cut)
    row = Fields(where, {key: text for key, text in block.values.items() if key not in unsure}, as_text=True)
    for label, (first, second) in block.conflicts.items():
        row.leave_out(label, f"stands there twice, as {first} and as {second}")
    if block.cut:
        row.leave_out(block.cut, "is where the text ends and may be cut through")
    if not block.closed:
        message = "the block is broken off: its last line is missing, and what came before it may be"
        row.find("truncated", "suspect", message)
    values = _values(row, console)
    measured = {label: value for label, value in values.items() if label not in ("limit", "rate")}
    if all(value is None for value in measured.values()):
        return None
    run = console.run(Fields(where, values, findings=row.findings))  # what it finds is added to the row's
    client = _client(console, block, row)
    notes = list(console.more["notes"].get(client, ()))
    backend = row.text("backend")
    asked = None
    if command and (contradiction := contradicts(command.asked(), run.workload, run.totals.completed)):
        row.find("command", "suspect", f"the command before the block is not of it: {contradiction}")
    elif command:
        asked = command.asked()
        how = "the arguments printed" if command.printed else "the command"
        notes += [f"model and workload from {how} before the block", *asked.notes]
        # What the block prints counts more.
        printed = {key: value for key, value in run.workload.model_dump().items() if value not in (None, "")}
        run = run.model_copy(update={"workload": asked.load.model_copy(update=printed), "model": asked.model})
    return run.model_copy(
        update={
            "client": f"{client}.console",
            "protocol": "" if block.offline else backend,
            "engine": console.more["engines"].get(client) or engine(backend),
            "mode": "offline" if block.offline else "online",
            "notes": (*notes, *run.notes),
            "findings": tuple(row.findings),
            "extra": row.rest() | (asked.others if asked else {}),
        }
    )


def _client(console: Format, block: Block, row: Fields) -> str:
    """The client that printed a block, by the labels that only it has."""
    labels = {*row.values, *(["offline"] if block.offline else [])}  # `offline` is of the header
    clients = console.more["clients"].items()
    return next((name for name, own in clients if not labels.isdisjoint(own)), "vllm.serve")


def _values(row: Fields, console: Format) -> dict[str, Any]:
    """The block's numbers by labels without units. Latencies are named as `mean_ttft_ms`; `limit` and `rate`
    stand for the several labels that console.toml has of each."""
    unit_of: dict[str, str] = {"benchmark duration": "s"}
    unit_of |= {path: rule.unit for path, rule in console.metrics.items() if not rule.latencies}
    latencies = {name for rule in console.metrics.values() for name in rule.latencies}
    unitless = {*console.load.values(), *console.totals.values()} - {"limit", "rate"}
    values: dict[str, Any] = {}
    for key in row.values:
        label, _, unit = key.partition(" (")
        if match := LATENCY.fullmatch(key):
            if match[2] in latencies:
                values[f"{match[1]}_{match[2]}_ms"] = _scaled(row, key, match[3], units("ms"))
        elif label in unit_of:
            known: Mapping[str, float] = {"": 1.0} if unit_of[label] == "1" else units(unit_of[label])
            values[label] = _scaled(row, key, unit.rstrip(")"), known)
        elif key in unitless:
            values[key] = row.number(key)
        elif key in console.more["rate"]:
            values["rate"] = row.number(key, infinite=0.0)  # 0: all at once
        elif key in console.more["limit"]:
            unlimited = str(row.take(key)).lower() in ("not set", "none")
            values["limit"] = None if unlimited else row.number(key)
    return values


def _scaled(row: Fields, key: str, unit: str, known: Mapping[str, float]) -> float | None:
    """The number under `key`, in our unit; None, with a finding, if its unit is not among the known ones."""
    if unit in known:
        return row.number(key, scale=known[unit])
    row.take(key)
    row.leave_out(key, f"is in {unit or 'no unit'}, not in one of {', '.join(known)}")
    return None


@dataclass(frozen=True)
class Asked:
    """What a command asks for."""

    load: OfferedLoad
    model: str
    notes: list[str]  # on the lengths of the load
    others: dict[str, Any]  # the other options


@dataclass(frozen=True)
class Command:
    """A client's command line."""

    program: str  # `vllm`, `sglang`, or `script`: benchmark_serving.py or bench_serving.py, of either
    options: Mapping[str, str]  # by name, with `_` between words
    printed: bool = False  # whether the client printed it itself

    def asked(self) -> Asked:
        not_given = ("", "None")
        named = {key: text for key, text in self.options.items() if "$" not in text and text not in not_given}
        row = Fields("command", named, as_text=True)
        dataset = row.text("dataset_name") or formats()["console"].more["datasets"][self.program]
        kind = "random" if dataset.startswith("random") else dataset
        isl, osl = _requested_length(row, kind, "input"), _requested_length(row, kind, "output")
        ratio = row.number(f"{kind}_range_ratio")
        if ratio is None and kind == "random" and self.program != "script":
            ratio = 0.0
        notes = []
        is_ratio_clear = self.program != "script" or ratio == 1  # a script's has two meanings: see above
        if self.program == "sglang" and "random_input_len" in named:
            isl, osl = mean_length(isl, ratio or 0.0), mean_length(osl, ratio or 0.0)
            how = f"means of those drawn between {ratio or 0.0:g} of what was asked for and all"
            notes.append(f"lengths: {how}")
        elif ratio is not None and isl is not None and not is_ratio_clear:
            option = f"--random-range-ratio {ratio:g}"
            notes.append(f"lengths left out: what {option} means depends on the script's version")
            isl = osl = None
        range_ratio = None  # the shortest length over the longest
        if ratio is not None and 0 <= ratio <= 1 and is_ratio_clear:
            range_ratio = (1 - ratio) / (1 + ratio) if self.program == "vllm" else ratio
        prefix = row.number(f"{kind}_prefix_len") or 0.0
        load = read_table(row, formats()["console"].more["command"])
        load["num_prompts"] = load["num_prompts"] or row.count("num_prompt")
        load["input_len"] = isl + prefix if isl is not None else None
        load |= {"dataset": dataset, "output_len": osl, "range_ratio": range_ratio}
        return Asked(OfferedLoad(**load), row.text("model"), notes, without_secrets(row.rest()))


def _requested_length(row: Fields, kind: str, side: str) -> float | None:
    """The length of a side, `input` or `output`, by the first of its options that the command has."""
    keys = (f"{kind}_{side}_len", f"{kind}_{side}", f"{side}_len")
    return next((row.number(key) for key in keys if key in row.values), None)


def command_of(block: Block, following: Block | None) -> Command | None:
    """The command that surely made a block; None if there is none. following: the next block"""
    candidates = list(commands(block.before))
    printed = [command for command in candidates if command.printed]
    if printed:
        last = printed[-1]
        return last if all(command.asked() == last.asked() for command in printed) else None
    next_has_its_own = following is None or any(commands(following.before))
    return candidates[0] if len(candidates) == 1 and next_has_its_own else None


def contradicts(asked: Asked, block: OfferedLoad, completed: int | None) -> str:
    """How a block contradicts the command; empty: it does not. completed: requests of the block"""
    requested = asked.load
    for name in ("concurrency", "request_rate", "warmup_s", "cooldown_s"):
        in_command, in_block = getattr(requested, name), getattr(block, name)
        if in_command is not None and in_block is not None and abs(in_command - in_block) > TOLERANCE:
            return f"{name} is {in_command:g} in the command and {in_block:g} in the block"
    if completed is not None and requested.num_prompts is not None and completed > requested.num_prompts:
        return f"the command sends {requested.num_prompts} prompts and {completed} completed"
    return ""


def commands(lines: Sequence[str]) -> Iterator[Command]:
    """The commands in some lines of a text, in their order; a backslash continues a line."""
    whole = re.sub(r"\\\n", " ", "\n".join(map(unprefixed, lines)))
    for text in whole.split("\n"):
        if match := NAMESPACE.search(text):
            options = {key: value.strip("'\"") for key, value in ARGUMENT.findall(match[1])}
            program = "script"
            if "sharegpt_context_len" in options:
                program = "sglang"
            elif "random_prefix_len" in options:
                program = "vllm"
            is_python = "<" not in match[1]  # ARGUMENT cannot read `<function f at 0x7f>`
            if is_python and {"num_prompts", "request_rate"} <= options.keys():
                yield Command(program, options, printed=True)
            continue
        for program, pattern in formats()["console"].more["programs"].items():
            if match := re.search(pattern, text):
                arguments = SHELL_END.sub("", text[match.end() :])
                options = {}
                for key, value in OPTION.findall(arguments):
                    options[key.replace("-", "_")] = value.strip("'\"") or "on"
                are_quotes_closed = arguments.count("'") % 2 == 0 and arguments.count('"') % 2 == 0
                if options and are_quotes_closed:
                    yield Command(program, options)
                break
