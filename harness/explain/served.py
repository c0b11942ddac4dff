"""What a trace or logs say of the shapes that were served, and of the tables and backends that were taken."""

from __future__ import annotations

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
from shapes.case import Size, parse
from shapes.lengths import parse_span

MOST_RATIO = {"m": 1.25, "tokens": 1.25, "batch": 1.25, "ctx": 1.5}
"""Size -> the most by which a served size may differ from a timed one, as a ratio, for the time to hold."""
MISSES = {
    "block_scale_gemm": re.compile(
        r"not found tuned config in \S*blockscale|Using default W8A8 Block FP8 kernel config"
    ),
    "fused_moe": re.compile(
        r"\[fused_moe\] using (\d\w+ )?default for|Using default MoE (kernel )?config|"
        "Fallback to triton version"
    ),
}
"""Op -> lines that say that its table has no entry, of AITER e404860, SGLang 0.5.23 and vLLM 0.33."""
HITS = re.compile(
    r"is tuned on cu_num|\[fused_moe\] using \d\w+ \(kernelName|Using (MoE kernel config|configuration) from"
)
"""Lines of the same versions that say that an entry of a table was taken."""
REFUSED = re.compile(r"\S+ has no kernel for this linear layer type.*|Unknown vLLM environment variable.*")
CHOSEN = re.compile(r"Using (\w+ )+backend\b.*|Use \S+ as \w+ backend.*")
AITER = re.compile(r"\[aiter\]|aiter", re.IGNORECASE)
SHOWN = 120  # the most characters of a line of a log that are shown


@dataclass
class Log:
    """What logs of a server say."""

    files: tuple[str, ...] = ()
    missed: dict[str, Counter[str]] = field(default_factory=dict)
    """Op -> shapes, else lines, for which a table had no entry, with how many lines say it."""
    hits: int = 0  # lines that say that an entry of a table was taken
    refused: Counter[str] = field(default_factory=Counter)  # lines that refuse a name, and how often each
    chosen: Counter[str] = field(default_factory=Counter)  # lines that name a backend, and how often each
    has_aiter: bool = False  # whether AITER wrote to them
    notes: tuple[str, ...] = ()  # on lines that need not be of the change

    def of_change(self, base: Log, names: Sequence[str]) -> Log:
        """The log without what is not of the change: misses that the base log has, too, and refusals, unless
        they have one of the names or are new beside a base log. Notes say what was left out. base: the log of
        the server without the change, perhaps without files; names: of the change's variables and flags"""
        patterns = [re.compile(rf"(?<![\w-]){re.escape(name)}(?!\w)") for name in names]
        log = replace(self, refused=Counter(), missed={})
        for line, count in self.refused.items():
            is_named = any(pattern.search(line) for pattern in patterns)
            if is_named or (base.files and line not in base.refused):
                log.refused[line] = count
            else:
                log.notes += (f"a log says, perhaps not of the change: {line}",)
        for op, lines in self.missed.items():
            known = base.missed.get(op, Counter())
            if new := {line: count for line, count in lines.items() if line not in known}:
                log.missed[op] = Counter(new)
            else:
                log.notes += (f"logs of both servers say of {op}: {next(iter(lines))}",)
        return log


def read_logs(paths: Sequence[str]) -> Log:
    """Raises UsageError where one cannot be read."""
    log = Log(tuple(paths))
    for path in paths:
        try:
            with Path(path).open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    _count(line.strip(), log)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return log


def _count(line: str, log: Log) -> None:
    """Adds what a line says to the log."""
    log.has_aiter = log.has_aiter or bool(AITER.search(line))
    for op, pattern in MISSES.items():
        if match := pattern.search(line):
            text = line[match.start() :][:SHOWN]
            if shape := GEMM.search(line):
                text = f"m={shape['m']} n={shape['n']} k={shape['k']}"
            log.missed.setdefault(op, Counter())[text] += 1
    if HITS.search(line):
        log.hits += 1
    for pattern, counts in ((REFUSED, log.refused), (CHOSEN, log.chosen)):
        if match := pattern.search(line):
            counts[match[0][:SHOWN]] += 1


def served_sizes(op: str, traffic: Traffic) -> Counter[str]:
    """The sizes of the op's calls in decode steps, as text, and how many calls have them. They are those that
    the file has for the op, else those of its steps; empty where it has neither."""
    if in_file := {sizes: count for (of, sizes), count in traffic.calls.items() if of == op}:
        return Counter(in_file)
    counts: Counter[str] = Counter()
    for step in traffic.steps:
        if step.decoding and not step.phase.prefill:
            lengths = step.phase.lengths
            sizes_by_op = {
                "block_scale_gemm": f"m={step.tokens}", "fused_moe": f"tokens={step.tokens}",
                "mla_decode": f"batch={step.decoding}" + (f" ctx={lengths[0]}" if lengths else ""),
            }  # fmt: skip
            if op in sizes_by_op:
                counts[sizes_by_op[op]] += step.count
    return counts


def unlike(before: Traffic, after: Traffic) -> str:
    """How the usual decode steps of two traces differ in requests and contexts; empty: not, or not known."""
    most = [served_sizes("mla_decode", traffic).most_common(1) for traffic in (before, after)]
    if not all(most):
        return ""
    [(text_before, _)], [(text_after, _)] = most
    if _holds_for(parse(text_before)[0], parse(text_after)[0]):
        return ""
    return f"{text_before} -> {text_after}"


@dataclass(frozen=True)
class Fit:
    """How the served calls fit the run's cases."""

    cases: frozenset[str]  # the keys of the cases that some served call has
    part: float  # the part of the served calls that have a case, 0..1
    served: str  # the sizes that most calls have
    source: str  # the file that tells them


def fit(alone: Alone, sizes: Counter[str], source: str) -> Fit | None:
    """sizes: served sizes, as text, with the number of calls. None where there are none"""
    if not sizes:
        return None
    cases_by_size = {
        text: [case.text for case in alone.cases if _holds_for(parse(text)[0], case.sizes)] for text in sizes
    }
    fitting = sum(count for text, count in sizes.items() if cases_by_size[text])
    most = ", ".join(text for text, _ in sizes.most_common(3))
    return Fit(frozenset(chain(*cases_by_size.values())), fitting / sizes.total(), most, source)


def _holds_for(served: Mapping[str, str], sizes: Mapping[str, Size]) -> bool:
    """Whether a time at these sizes holds for the served ones, which may be some of the op's sizes."""
    for name in served.keys() & sizes:
        if name in MOST_RATIO:
            ratio = sum(parse_span(served[name])) / sum(parse_span(sizes[name]))
            if abs(math.log(ratio)) > math.log(MOST_RATIO[name]):
                return False
        elif name in ("n", "k") and str(sizes[name]) != served[name]:
            return False
    return True
