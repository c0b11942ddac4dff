"""`python -m harness tune`: which configuration each case is to run with, found and stored as data."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

import kernels
from harness.architectures import Architecture, chosen
from harness.compile_command import able
from harness.errors import FAILED, OK, NothingRan, UsageError
from harness.estimate import WITHIN
from harness.plan import choose_cases, choose_implementations, choose_op
from harness.provenance import git_state
from harness.tuned import Place, path, read, source, store
from kernels.op import Op
from kernels.platform import version
from kernels.tuning import TUNED, words


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
) -> int:
    """Tunes by compiling, prints what was found, and stores it, or holds it against what is stored; gives the
    exit code."""
    targets = able(chosen(target))
    part = _shard(shard)
    folder = Path(out) if out else TUNED
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
        print(_table(rows))
    for line in bad:
        print(line, file=sys.stderr)
    return FAILED if bad else OK


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text}: write 1/4 for the first of four parts")
    return int(match[1]), int(match[2])


def _tuned(
    op: Op,
    impl: str | None,
    suite: str | None,
    texts: Sequence[str],
    architecture: Architecture,
    shard: tuple[int, int],
) -> Iterator[Found]:
    from harness.candidates import Compiling, Progress
    from harness.launches import implementations, shipped

    wanted = {i.name for i in choose_implementations(op, impl)}
    whole = not (suite or texts)
    cases = shipped(op.name) if whole else choose_cases(op, suite, texts, "core", architecture.arch)
    for implementation in implementations(op.name):
        if implementation.name not in wanted:
            continue
        progress = Progress(f"{architecture.arch} {op.name} {implementation.name}")
        compiling = Compiling(implementation, architecture, shard, progress)
        searches = compiling.searches(cases)
        compiling.run(searches)
        if searches:
            yield Found(compiling, searches)


class Found:
    """What was found for an implementation on an architecture.

    choices: as they are stored
    rows:    as they are printed
    """

    def __init__(self, compiling: Any, searches: Sequence[Any]) -> None:
        from harness.search import fewest

        self.compiling, self.searches = compiling, searches
        picked = fewest(searches)
        self.choices = [_choice(one, picked[one.case]) for one in searches if one.case in picked]
        self.rows = [self._row(one, picked.get(one.case)) for one in searches]

    @property
    def place(self) -> Place:
        return Place(self.compiling.architecture.kind, self.compiling.architecture.arch)

    def store(self, folder: Path) -> Path:
        implementation = self.compiling.implementation
        provenance = {
            "triton": version("triton"),
            "commit": git_state()["commit"],
            "source": source(implementation),
            "criterion": _criterion(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        return store(folder, implementation.name, self.place, self.choices, provenance)

    def differences(self, folder: Path) -> list[str]:
        """One line for each case whose stored choice is not as good as the best, or not of these kernels."""
        implementation = self.compiling.implementation
        file = path(folder, implementation.name, self.place)
        stored = {choice["case"]: choice for choice in read(file)["choices"]}
        made_of = source(implementation)
        lines = []
        for one in self.searches:
            where = f"{self.place.arch} {implementation.name} {one.case}"
            choice = stored.get(one.case)
            if choice is None:
                lines += [f"{where}: nothing is stored in {file}"] if one.good else []
            elif choice["source"] != made_of:
                lines.append(f"{where}: was made from other kernels ({choice['source']}, now {made_of})")
            elif choice["config"] not in [asdict(good.config) for good in one.good]:
                best = f"; the best is {words(one.good[0].config)}" if one.good else ""
                lines.append(f"{where}: its choice is not within {WITHIN:.0%} of the best{best}")
        return lines

    def _row(self, search: Any, one: Any) -> dict[str, Any]:
        judged = search.candidates[: search.at]
        second = next((each for each in search.fitting_best_first if each is not one), None)
        return {
            "target": self.place.arch,
            "op": self.compiling.op.name,
            "implementation": self.compiling.implementation.name,
            "case": search.case,
            "config": asdict(one.config) if one else None,
            "estimate_us": _us(one),
            "bound_by": one.estimate.bound if one else "",
            "resident": one.resident if one else [],
            "second": asdict(second.config) if second else None,
            "second_us": _us(second),
            "configurations": len(search.candidates),
            "judged": sum(each.judged for each in judged),
            "refused": dict(search.refusals),
        }


def _choice(search: Any, one: Any) -> dict[str, Any]:
    return {
        "case": search.case,
        "features": search.implementation.features(search.sizes),
        "config": asdict(one.config),
        "estimate_us": _us(one),
        "best_us": _us(search.good[0]),
        "bound_by": one.estimate.bound,
        "resident": one.resident,
    }


def _us(one: Any) -> float | None:
    return round(one.estimate.seconds * 1e6, 2) if one else None


def _criterion() -> str:
    """Changes with the formula and with what it knows of devices."""
    from harness import architectures, ceilings, estimate

    texts = [Path(f).read_text() for f in (estimate.__file__, architectures.DATA, ceilings.DATA)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def _write(json_to: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from harness.listing import write

    text = json.dumps({"tuned": rows}, indent=1) + "\n"
    if json_to == "-":
        sys.stdout.write(text)
    else:
        write(json_to, text)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for all cases of a target for which the same configuration was chosen, by the same bound."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        config = _words(row["config"])
        groups.setdefault((row["target"], row["implementation"], config, row["bound_by"]), []).append(row)
    lines = []
    for (target, implementation, config, bound), group in groups.items():
        refused = Counter[str]()
        for row in group:
            refused.update(row["refused"])
        lines.append(
            [
                target,
                implementation,
                len(group),
                group[0]["case"],
                config or "none fits",
                _span([row["estimate_us"] for row in group]),
                bound,
                "\n".join(dict.fromkeys(_words(row["second"]) for row in group[:2])),
                sum(row["configurations"] for row in group),
                sum(row["judged"] for row in group),
                sum(refused.values()),
            ]
        )
    headers = ["target", "implementation", "cases", "one of them", "configuration", "estimate us",
               "bound by", "second", "configurations", "compiled", "refused"]  # fmt: skip
    return tabulate(lines, headers, disable_numparse=True)


def _words(config: Mapping[str, Any] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items()) if config else ""


def _span(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = f"{min(known):.3g}", f"{max(known):.3g}"
    return low if low == high else f"{low}-{high}"
