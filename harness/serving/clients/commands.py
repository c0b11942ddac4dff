"""Command lines of serving clients, in a text or before a block of results: the load that they ask for.

Before a block, taken only where there is no doubt which block it is of: vLLM's and SGLang's clients print
their arguments (`Namespace(...)`) in the same run; a command counts where it is the only one before its block
and the next block has one of its own. What it says must not contradict the block.

Lengths: vLLM's `bench serve` draws from [L (1 - r), L (1 + r)] with r below 1, so their mean is L; SGLang's
from [L r, L]; both with r = 0 unless given. benchmark_serving.py had both meanings in its time, so but for
r = 1, which only the second has, its length is not told.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.serving.clients.console_text import unprefixed
from harness.serving.clients.fields import Fields
from harness.serving.clients.format import mean_of_range, ramp_up
from harness.serving.schema import OfferedLoad

PROGRAMS = {
    "vllm": re.compile(r"\bvllm\s+bench\s+serve\b"),
    "sglang": re.compile(r"\bsglang\.bench_serving\b"),
    "script": re.compile(r"\bbenchmark_serving(?:\.py)?\b|\bbench_serving\.py\b"),
}
DATASETS = {"vllm": "random", "sglang": "sharegpt", "script": "sharegpt"}  # where none is given
NAMESPACE = re.compile(r"\bNamespace\((.*)\)\s*$")
SHELL_ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "2>", "2>&1"}
TOLERANCE = 1e-2  # blocks print rates with two decimals


@dataclass(frozen=True)
class Command:
    """program: a key of PROGRAMS; options: by name, as text, `_` between words."""

    program: str
    options: Mapping[str, str]
    printed: bool = False

    @property
    def model(self) -> str:
        return _said(self.options.get("model", ""))

    def workload(self) -> tuple[OfferedLoad, str]:
        """What was asked for, and a note where its lengths are not told."""
        row = Fields("command", {k: v for k, v in self.options.items() if _said(v)}, as_text=True)
        dataset = row.text("dataset_name") or DATASETS[self.program]
        kind = "random" if dataset.startswith("random") else dataset
        into, out = (self._length(row, kind, which) for which in ("input", "output"))
        ratio = row.number(f"{kind}_range_ratio")
        if ratio is None and kind == "random" and self.program != "script":
            ratio = 0.0
        prefix = row.number(f"{kind}_prefix_len") or 0.0
        into, out, note = self._means(into, out, ratio)
        return OfferedLoad(
            dataset=dataset,
            input_len=into + prefix if into is not None else None,
            output_len=out,
            range_ratio=self._range(ratio),
            concurrency=row.number("max_concurrency"),
            request_rate=row.number("request_rate", infinite=0.0),
            burstiness=row.number("burstiness"),
            ramp_up=ramp_up(row),
            num_prompts=row.count("num_prompts") or row.count("num_prompt"),
            warmup_s=row.number("warmup_time"),
            cooldown_s=row.number("cooldown_time"),
        ), note

    def _length(self, row: Fields, kind: str, which: str) -> float | None:
        length = row.number(f"{kind}_{which}_len")
        if length is None and kind == "random":
            length = row.number(f"random_{which}")
        return length if length is not None else row.number(f"{which}_len")

    def _range(self, ratio: float | None) -> float | None:
        """The shortest length over the longest; None where that is not told."""
        if ratio is None or not 0 <= ratio <= 1:
            return None
        if self.program == "vllm":
            return (1 - ratio) / (1 + ratio)
        return ratio if self.program == "sglang" or ratio == 1 else None

    def _means(
        self, into: float | None, out: float | None, ratio: float | None
    ) -> tuple[float | None, float | None, str]:
        if self.program == "sglang" and "random_input_len" in self.options:
            least = ratio or 0.0
            into, out = (mean_of_range(length, least) for length in (into, out))
            return into, out, f"lengths: means of those drawn between {least:g} of what was asked for and all"
        if self.program == "script" and ratio not in (None, 1.0) and into is not None:
            why = (
                f"lengths left out: what --random-range-ratio {ratio:g} means depends on the script's version"
            )
            return None, None, why
        return into, out, ""


def command_of(before: Sequence[str], next_before: Sequence[str] | None) -> Command | None:
    """The one command that the block after `before` is of; next_before: the lines between it and the next."""
    candidates = list(commands(before))
    printed = [command for command in candidates if command.printed]
    if printed:
        last = printed[-1]
        return last if all(command.workload() == last.workload() for command in printed) else None
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


def _said(value: str) -> str:
    """The value, or nothing where it is none, or a shell's variable."""
    return "" if value in ("None", "") or "$" in value else value


def commands(lines: Sequence[str]) -> Iterator[Command]:
    """Those in some lines of a text, in their order."""
    for text in _joined(lines):
        if match := NAMESPACE.search(text):
            yield from _namespace(match[1])
            continue
        for program, pattern in PROGRAMS.items():
            match = pattern.search(text)
            if match and (options := _options(text[match.end() :])):
                yield Command(program, options)
                break


def _joined(lines: Sequence[str]) -> Iterator[str]:
    """Lines with those that continue them behind a backslash."""
    whole = ""
    for line in lines:
        text = unprefixed(line)
        if text.endswith("\\"):
            whole += text[:-1] + " "
            continue
        yield whole + text
        whole = ""
    if whole:
        yield whole


def _options(text: str) -> dict[str, str]:
    try:
        words = shlex.split(text.rstrip("`"), comments=True)
    except ValueError:
        return {}  # a quote that nothing closes
    end = next((i for i, word in enumerate(words) if word in SHELL_ENDS), len(words))
    options, name = {}, ""
    for word in words[:end]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = value if equals else ""
            name = "" if equals else name
        elif name:
            options[name] = word
            name = ""
    return options


def _namespace(text: str) -> Iterator[Command]:
    """argparse's own print. SGLang's client has `sharegpt_context_len`, which vLLM's has not."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if not isinstance(call, ast.Call):
        return
    options = {}
    for keyword in call.keywords:
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = keyword.value.id if isinstance(keyword.value, ast.Name) else None
        if keyword.arg and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            options[keyword.arg] = str(value)
    names = {keyword.arg for keyword in call.keywords}
    if not {"num_prompts", "request_rate"} <= names:
        return
    program = (
        "sglang" if "sharegpt_context_len" in names else "vllm" if "random_prefix_len" in names else "script"
    )
    yield Command(program, options, printed=True)
