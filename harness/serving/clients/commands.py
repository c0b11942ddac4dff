"""Command lines of serving clients before a block of results: the load that they ask for.

Taken only where there is no doubt which block a command is of: vLLM's and SGLang's clients print their
arguments (`Namespace(...)`) in the same run; a command counts where it is the only one before its block and
the next block has one of its own. What it says must not contradict the block.

Lengths: vLLM's `bench serve` draws from [L (1 - r), L (1 + r)] with r below 1, so their mean is L; SGLang's
from [L r, L]; both with r = 0 unless given. benchmark_serving.py had both meanings in its time, so but for
r = 1, which only the second has, its length is not told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.serving.clients.console_text import unprefixed
from harness.serving.clients.fields import Fields
from harness.serving.clients.format import formats, mean_of_range, read_load
from harness.serving.schema import OfferedLoad

PROGRAMS = {
    "vllm": re.compile(r"\bvllm\s+bench\s+serve\b"),
    "sglang": re.compile(r"\bsglang\.bench_serving\b"),
    "script": re.compile(r"\bbenchmark_serving(?:\.py)?\b|\bbench_serving\.py\b"),
}
DATASETS = {"vllm": "random", "sglang": "sharegpt", "script": "sharegpt"}  # where none is given
OPTION = re.compile(r"""--([\w-]+)(?:[= ]\s*(?!--)("[^"]*"|'[^']*'|[^\s`]+))?""")
NAMESPACE = re.compile(r"\bNamespace\((\w+=.*)\)\s*$")
ARGUMENT = re.compile(r"""(\w+)=('[^']*'|"[^"]*"|[\w.+-]+)(?=,|$)""")
SHELL_END = re.compile(r"""\s(?:[|;&]|\d?>)(?=[^"']*(?:["'][^"']*["'][^"']*)*$).*|\s#.*""")
TOLERANCE = 1e-2  # blocks print rates with two decimals


@dataclass(frozen=True)
class Command:
    """program: a key of PROGRAMS; options: by name, as text, `_` between words; printed: by the client
    itself."""

    program: str
    options: Mapping[str, str]
    printed: bool = False

    def workload(self) -> tuple[OfferedLoad, str, str]:
        """What was asked for, the model, and a note where its lengths are not told."""
        said = {
            key: text for key, text in self.options.items() if "$" not in text and text not in ("", "None")
        }
        row = Fields("command", said, as_text=True)
        dataset = row.text("dataset_name") or DATASETS[self.program]
        kind = "random" if dataset.startswith("random") else dataset
        names = [(f"{kind}_{side}_len", f"{kind}_{side}", f"{side}_len") for side in ("input", "output")]
        into, out = (row.number(next((key for key in keys if key in said), "")) for keys in names)
        ratio, note, kept = row.number(f"{kind}_range_ratio"), "", None
        if ratio is None and kind == "random" and self.program != "script":
            ratio = 0.0
        if self.program == "sglang" and "random_input_len" in said:
            into, out = (mean_of_range(length, ratio or 0.0) for length in (into, out))
            note = f"lengths: means of those drawn between {ratio or 0.0:g} of what was asked for and all"
        elif self.program == "script" and ratio not in (None, 1.0) and into is not None:
            given = f"--random-range-ratio {ratio:g}"
            note = f"lengths left out: what {given} means depends on the script's version"
            into = out = None
        if ratio is not None and 0 <= ratio <= 1 and (self.program != "script" or ratio == 1):
            kept = (1 - ratio) / (1 + ratio) if self.program == "vllm" else ratio
        prefix = row.number(f"{kind}_prefix_len") or 0.0
        load = read_load(row, formats()["console"].more["command"])
        load["num_prompts"] = load["num_prompts"] or row.count("num_prompt")
        load["input_len"] = into + prefix if into is not None else None
        load |= {"dataset": dataset, "output_len": out, "range_ratio": kept}
        return OfferedLoad(**load), row.text("model"), note


def command_of(before: Sequence[str], next_before: Sequence[str] | None) -> Command | None:
    """The one command that the block after `before` is of; next_before: the lines between it and the next."""
    candidates = list(commands(before))
    printed = [command for command in candidates if command.printed]
    if printed:
        return printed[-1] if all(one.workload() == printed[-1].workload() for one in printed) else None
    if len(candidates) != 1 or (next_before is not None and not any(commands(next_before))):
        return None
    return candidates[0]


def contradicts(requested: OfferedLoad, block: OfferedLoad, completed: int | None) -> str:
    """What the block says otherwise than the command; empty: nothing."""
    for name in ("concurrency", "request_rate", "warmup_s", "cooldown_s"):
        in_command, in_block = getattr(requested, name), getattr(block, name)
        if in_command is not None and in_block is not None and abs(in_command - in_block) > TOLERANCE:
            return f"{name} is {in_command:g} in the command and {in_block:g} in the block"
    if completed is not None and requested.num_prompts is not None and completed > requested.num_prompts:
        return f"the command sends {requested.num_prompts} prompts and {completed} completed"
    return ""


def commands(lines: Sequence[str]) -> Iterator[Command]:
    """Those in some lines of a text, in their order; a backslash continues a line."""
    whole = re.sub(r"\\\n", " ", "\n".join(map(unprefixed, lines)))
    for text in whole.split("\n"):
        if match := NAMESPACE.search(text):
            options = {key: value.strip("'\"") for key, value in ARGUMENT.findall(match[1])}
            # SGLang's client has `sharegpt_context_len`, which vLLM's has not.
            marks = {"sglang": "sharegpt_context_len", "vllm": "random_prefix_len", "script": ""}
            program = next(one for one, mark in marks.items() if not mark or mark in options)
            if {"num_prompts", "request_rate"} <= options.keys() and "<" not in match[1]:
                yield Command(program, options, printed=True)
            continue
        for program, pattern in PROGRAMS.items():
            if match := pattern.search(text):
                rest = SHELL_END.sub("", text[match.end() :])
                found = {key.replace("-", "_"): value.strip("'\"") for key, value in OPTION.findall(rest)}
                if found and rest.count("'") % 2 == rest.count('"') % 2 == 0:  # every quote is closed
                    yield Command(program, found)
                break
