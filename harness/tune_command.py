"""`python -m harness tune`: which configuration each case is to run with, found and stored as data."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

import kernels
from harness import plan
from harness.architectures import Architecture, chosen
from harness.compile_command import able
from harness.errors import FAILED, OK, NothingRan
from harness.plan import choose_cases, choose_implementations, choose_op
from harness.tuned import require_writable
from harness.writing import write
from kernels.op import Op
from kernels.tuning import TUNED, Tunable


def show(
    op: str | None,
    impl: str | None,
    suite: str | None,
    case: Sequence[str],
    target: str | None,
    shard: str | None,
    out: str | None,
    json_to: str | None,
    check: bool,
    **racing: Any,
) -> int:
    """Races configurations where they can be timed and no target is named, else ranks them by compiling;
    prints what was found, and stores it, or holds it against what is stored; gives the exit code.

    racing: the fields of harness.race_command.Racing that were given
    """
    from harness import race_command

    part = plan.parse_shard(shard)
    folder = Path(out) if out else TUNED
    if not (check or shard):
        require_writable(folder)
    compiling = "--target" if target else "--check" if check else ""
    found = race_command.tried(
        race_command.Chosen(op, impl, suite, case, part), race_command.Racing(**racing), folder, compiling
    )
    if found is not None:
        code, rows = found
        if json_to:
            _write(json_to, rows)
        return code
    targets = able(chosen(target))
    rows, bad = [], []
    for name in [choose_op(op).name] if op else list(kernels.OPS):
        for architecture in targets:
            for found in _tuned(kernels.OPS[name], impl, suite, case, architecture, part):
                rows += found.rows
                if check:
                    bad += found.differences(folder)
                elif shard is None:
                    print(f"stored {found.store(folder)}", file=sys.stderr)
    if not rows:
        raise NothingRan("no case is one that a Triton implementation of these takes")
    if json_to:
        _write(json_to, rows)
    elif shard is None:
        print(_tables(rows))
    for line in bad:
        print(line, file=sys.stderr)
    return FAILED if bad else OK


def _tuned(
    op: Op,
    impl: str | None,
    suite: str | None,
    texts: Sequence[str],
    architecture: Architecture,
    shard: tuple[int, int],
) -> Iterator[Any]:
    from harness.candidates import Compiling, Progress
    from harness.found import Found
    from harness.launches import implementations, tuned

    wanted = {i.name for i in choose_implementations(op, impl)}
    whole = not (suite or texts)
    cases = tuned(op.name) if whole else choose_cases(op, suite, texts, "core", architecture.arch)
    for implementation in implementations(op.name):
        if implementation.name not in wanted:
            continue
        if type(implementation).demands is Tunable.demands:
            print(f"left out: {implementation.name} does not say what its kernels ask for", file=sys.stderr)
            continue
        progress = Progress(f"{architecture.arch} {op.name} {implementation.name}")
        compiling = Compiling(implementation, architecture, shard, progress)
        searches = compiling.searches(cases)
        compiling.run(searches)
        if searches:
            yield Found(compiling, searches)


def _write(json_to: str, rows: Sequence[Mapping[str, Any]]) -> None:
    write(json_to, json.dumps({"tuned": rows}, indent=1) + "\n")


def _tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of each target and implementation what was considered, and a line for all cases that got the same
    configuration and are bound by the same."""
    of_each: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        of_each.setdefault((row["target"], row["implementation"]), []).append(row)
    return "\n\n".join(
        f"{target} {implementation}, {_considered(group)}\n{_table(group)}"
        for (target, implementation), group in of_each.items()
    )


def _considered(rows: Sequence[Mapping[str, Any]]) -> str:
    """Over all cases; reasons that differ in numbers count as one."""
    refused = Counter[str]()
    for row in rows:
        for why, count in row["refused"].items():
            refused[re.sub(r"\d+", "N", why)] += count
    considered, judged = (sum(row[name] for row in rows) for name in ("configurations", "judged"))
    said = f"{len(rows)} cases: {considered} configurations, {considered - judged} of them known to be worse"
    said += f" without compiling; {sum(refused.values())} refused"
    return "\n".join([said, *(f"  {count}: {why}" for why, count in refused.most_common())])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((_words(row["config"]), row["bound_by"]), []).append(row)
    lines = [
        [
            len(group),
            group[0]["case"],
            config or "none may be shipped",
            _span([row["estimate_us"] for row in group]),
            bound,
            _words(group[0]["second"]),
            group[0]["second_us"],
        ]
        for (config, bound), group in groups.items()
    ]
    headers = ["cases", "first of them", "configuration", "estimate us", "bound by", "second there", "us"]
    return tabulate(lines, headers, disable_numparse=True)


def _words(config: Mapping[str, Any] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items()) if config else ""


def _span(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = f"{min(known):.3g}", f"{max(known):.3g}"
    return low if low == high else f"{low}-{high}"
