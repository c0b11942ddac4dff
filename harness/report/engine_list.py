"""What a serving engine would run by default on an architecture, beside what the suite can run there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import kernels
from harness.errors import UsageError
from harness.report.lists import Listing, Row
from kernels import engines
from kernels.engines import EngineDefault
from kernels.mla_decode.sizes import MODEL_LEN
from kernels.platform import Platform, detect, named
from kernels.support import Support

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.report.fitting_table import FittingTable

Answer = tuple[EngineDefault, Support]

NO_ROW = Support(False, "the suite has no such row")


def engine_platform(engine: str, kind: str | None, arch: str) -> Platform:
    """The platform that an engine is asked about: of an architecture, else this machine's or that of a kind.

    Raises UsageError where the engine or the architecture is unknown, or the two contradict each other.
    """
    if engine not in engines.engines():
        raise UsageError(f"unknown engine {engine!r}; engines: {', '.join(engines.engines())}")
    machine = detect()
    if kind and not arch:
        machine = machine if machine.kind == kind else named(kind)
    arch = arch or machine.arch
    if arch not in (known := engines.archs(engine)):
        raise UsageError(
            f"no defaults of {engine} for {arch!r}; --arch takes {', '.join(known)}; "
            f"read at {engine} {engines.defaults(engine)[0].version}"
        )
    if kind not in (None, engines.kind(arch)):
        raise UsageError(f"{arch} is of platform {engines.kind(arch)}, not {kind}")
    return machine if machine.arch == arch else named(engines.kind(arch), arch)


def of_engine(engine: str, ops: Sequence[str], platform: Platform) -> Listing:
    """Every entry of an engine for these ops there, in its order: the first that applies holds, and those
    with flags only where these are set."""
    answers = [
        (entry, _support(entry, platform))
        for op in ops
        for entry in engines.entries(engine, op, platform.arch)
    ]
    release = f"{engine} {engines.defaults(engine)[0].version}"
    return Listing([_row(*answer) for answer in answers], lambda: _by_op(release, answers))


def _support(entry: EngineDefault, platform: Platform) -> Support:
    by_name = {implementation.name: implementation for implementation in kernels.implementations(entry.op)}
    implementation = by_name.get(entry.row)
    return implementation.available(platform) if implementation else NO_ROW


def _row(entry: EngineDefault, support: Support) -> Row:
    return {
        "op": entry.op,
        "when": list(entry.when),
        "implementation": entry.row,
        "engine": entry.engine,
        "version": entry.version,
        "source": f"{entry.file}:{entry.line}",
        "function": entry.function,
        "runs": support.ok,
        "why not": support.reason,
        "why": entry.why,
        "flags": entry.flags,
    }


def _by_op(release: str, answers: Sequence[Answer]) -> RenderableType:
    """Of each op what holds where nothing is set, then what flags make of it."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [f"{release}: the first line that applies to a case holds"]
    for op, group in groupby(answers, lambda answer: answer[0].op):
        of_op = list(group)
        for flags in sorted({entry.flags for entry, _ in of_op}):
            parts += ["", Text(f"{op} with {flags}" if flags else op, "bold")]
            parts.append(_table([answer for answer in of_op if answer[0].flags == flags]))
    on_gpu = [entry for entry, _ in answers if not entry.archs[0].startswith("x86")]
    if any(entry.op == "mla_decode" for entry in on_gpu):
        said = f"{MODEL_LEN} where a case has no model_len"
        parts += ["", f"mla_decode: split for the context length of the server, {said}"]
    return Group(*parts, "", "with --json: why, and the whole paths")


def _table(answers: Sequence[Answer]) -> FittingTable:
    from harness.report.fitting_table import Column, FittingTable

    headers = ("case", "implementation", "can run", "decided in")
    cells = [
        (
            "\n".join(entry.when) or "all",
            entry.row or "none",
            ("yes" if support.ok else "no") if entry.row else "",
            f"{entry.file.rpartition('/')[2]}:{entry.line}",
        )
        for entry, support in answers
    ]
    return FittingTable([Column(header) for header in headers], cells)
