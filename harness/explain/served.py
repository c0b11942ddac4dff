"""What a trace or logs say of the shapes that were served, and of the tables and backends that were taken."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from harness.errors import UsageError
from harness.explain.alone import Alone
from harness.traffic.log import GEMM
from harness.traffic.steps import Traffic
from harness.traffic.trace import read_trace
from shapes.case import Size, parse
from shapes.lengths import parse_span

ALIKE = {"m": 1.25, "tokens": 1.25, "batch": 1.25, "ctx": 1.5}
"""The most by which a size may differ for a time to be of it; other sizes have to be equal."""
MISSES = {
    "block_scale_gemm": re.compile(
        r"not found tuned config in \S*blockscale|Using default W8A8 Block FP8 kernel config"
    ),
    "fused_moe": re.compile(
        r"\[fused_moe\] using (\d\w+ )?default for|Using default MoE (kernel )?config|"
        "Fallback to triton version"
    ),
}
"""Lines of AITER e404860, SGLang 0.5.23 and vLLM 0.33, which say that no entry of a table was taken."""
HITS = re.compile(
    r"is tuned on cu_num|\[fused_moe\] using \d\w+ \(kernelName|Using (MoE kernel config|configuration) from"
)
REFUSED = re.compile(r"\S+ has no kernel for this linear layer type.*|Unknown vLLM environment variable.*")
CHOSEN = re.compile(r"Using (\w+ )+backend\b.*|Use \S+ as \w+ backend.*")
AITER = re.compile(r"\[aiter\]|aiter", re.IGNORECASE)
SHOWN = 120
"""The most characters of a line of a log that are shown."""


@dataclass
class Log:
    """What logs of the server with the change say, each text with how many lines say it.

    missed: by op; hits, refused, chosen: lines; shapes: of the misses, in the names of sizes
    unsure: notes on lines that need not be of the change
    """

    files: tuple[str, ...] = ()
    missed: dict[str, Counter[str]] = field(default_factory=dict)
    hits: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    chosen: Counter[str] = field(default_factory=Counter)
    has_aiter: bool = False
    unsure: tuple[str, ...] = ()

    def beyond(self, base: Log, names: Sequence[str]) -> Log:
        """Without what the log of the server without the change says, too, and without refusals that need not
        be of the change. names: of its variables and flags"""
        named = [re.compile(rf"(?<![\w-]){re.escape(name)}(?!\w)") for name in names]
        log = replace(self, refused=Counter(), missed={})
        for line, count in self.refused.items():
            if any(name.search(line) for name in named) or (base.files and line not in base.refused):
                log.refused[line] = count
            else:
                log.unsure += (f"a log says, perhaps not of the change: {line}",)
        for op, lines in self.missed.items():
            if own := {line: count for line, count in lines.items() if line not in base.missed.get(op, ())}:
                log.missed[op] = Counter(own)
            else:
                log.unsure += (f"logs of both servers say of {op}: {next(iter(lines))}",)
        return log


def read_logs(paths: Sequence[str]) -> Log:
    """Raises UsageError where one cannot be read."""
    log = Log(tuple(paths))
    for path in paths:
        try:
            with Path(path).open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    _take(line.strip(), log)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return log


def _take(line: str, log: Log) -> None:
    log.has_aiter = log.has_aiter or bool(AITER.search(line))
    for op, pattern in MISSES.items():
        if match := pattern.search(line):
            shape = GEMM.search(line)
            text = f"m={shape[2]} n={shape[3]} k={shape[4]}" if shape else line[match.start() :][:SHOWN]
            log.missed.setdefault(op, Counter())[text] += 1
    log.hits += bool(HITS.search(line))
    for pattern, counts in ((REFUSED, log.refused), (CHOSEN, log.chosen)):
        if match := pattern.search(line):
            counts[match[0][:SHOWN]] += 1


def of_trace(path: str) -> Traffic:
    """What a trace tells of its steps; nothing where it has neither annotations nor shapes."""
    traffic = Traffic()
    with contextlib.suppress(UsageError):  # speculation that does not say its drafts
        read_trace(Path(path), traffic)
    return traffic


def served_sizes(op: str, traffic: Traffic) -> Counter[str]:
    """Sizes of the op's calls in decode steps -> how many."""
    if own := {text: count for (of, text), count in traffic.calls.items() if of == op}:
        return Counter(own)
    counts: Counter[str] = Counter()
    for step in traffic.steps:
        if step.decoding and not step.phase.prefill:
            lengths = step.phase.lengths
            texts = {
                "block_scale_gemm": f"m={step.tokens}", "fused_moe": f"tokens={step.tokens}",
                "mla_decode": f"batch={step.decoding}" + (f" ctx={lengths[0]}" if lengths else ""),
            }  # fmt: skip
            counts[texts.get(op, "")] += step.count
    counts.pop("", None)
    return counts


def unlike(before: Traffic, after: Traffic) -> str:
    """How the decode steps of two traces differ in requests and contexts; empty where they do not."""
    sides = [served_sizes("mla_decode", each).most_common(1) for each in (before, after)]
    if not all(sides):
        return ""
    texts = [side[0][0] for side in sides]
    return "" if alike(parse(texts[0])[0], parse(texts[1])[0]) else f"{texts[0]} -> {texts[1]}"


@dataclass(frozen=True)
class Fit:
    """How the served calls fit the run's cases. cases: those that some call has; part: of the calls"""

    cases: frozenset[str]
    part: float
    served: str
    source: str


def fit(alone: Alone, sizes: Counter[str], source: str) -> Fit | None:
    """None where no shape is known."""
    if not sizes:
        return None
    fits = {text: [c.text for c in alone.cases if alike(parse(text)[0], c.sizes)] for text in sizes}
    part = sum(count for text, count in sizes.items() if fits[text]) / sizes.total()
    most = ", ".join(text for text, _ in sizes.most_common(3))
    return Fit(frozenset(chain(*fits.values())), part, most, source)


def alike(served: Mapping[str, str], sizes: Mapping[str, Size]) -> bool:
    """Whether a time at the one holds for the other."""
    for name in served.keys() & sizes:
        if name in ALIKE:
            here, there = (sum(parse_span(of[name])) for of in (served, sizes))
            if abs(math.log(here / there)) > math.log(ALIKE[name]):
                return False
        elif name in ("n", "k") and str(sizes[name]) != served[name]:
            return False
    return True
