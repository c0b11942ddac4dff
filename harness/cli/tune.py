"""`python -m harness tune`: which configuration each case is to run with, found and stored as data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kernels
from harness.catalogue.architectures import Architecture, select_architectures
from harness.cli.run import end_text
from harness.compile.survey import able
from harness.errors import FAILED, OK, NothingRan
from harness.files import write
from harness.plan import budget
from harness.plan.select import choose_cases, choose_implementations, choose_op
from harness.progress import Progress
from harness.report.tune_table import stored_text, summary, tune_tables
from harness.results.schema import Record, Run
from harness.run.session import Outcome
from harness.tune.store import require_writable
from kernels.op import Op
from kernels.tuning import TUNED, Tunable
from shapes.case import Case


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

    racing: the fields of harness.tune.race.RaceRequest that were given
    """
    from harness.tune import race

    part = budget.parse_shard(shard)
    folder = Path(out) if out else TUNED
    if not (check or shard):
        require_writable(folder)
    compiling = "--target" if target else "--check" if check else ""
    tuned = race.TuneRequest(op, impl, suite, case, part, folder)
    raced = race.race_if_possible(tuned, race.RaceRequest(**racing), compiling, RaceTables())
    if raced is not None:
        code, rows = raced
        if json_to:
            _write(json_to, rows)
        return code
    targets = able(select_architectures(target))
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
        print(tune_tables(rows))
    for line in bad:
        print(line, file=sys.stderr)
    return FAILED if bad else OK


class RaceTables:
    """What a person sees of a race: tables on stdout, progress and log on stderr."""

    def __init__(self) -> None:
        self.progress = Progress(quiet=False)

    def log(self, line: str) -> None:
        print(line, file=sys.stderr)

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        print(f"\n{summary(records)}")

    def stored(self, file: Path, choice: Mapping[str, Any] | None) -> None:
        if choice is None:
            print(
                "nothing stored: there is no verdict on the configuration that was used before\n", flush=True
            )
        else:
            print(f"stored in {file}: {stored_text(choice)}\n", flush=True)

    def end(self, run: Run, outcome: Outcome) -> None:
        print(end_text(outcome))


def _tuned(
    op: Op,
    impl: str | None,
    suite: str | None,
    texts: Sequence[str],
    architecture: Architecture,
    shard: tuple[int, int],
) -> Iterator[Any]:
    from harness.compile.launches import implementations, tuned
    from harness.tune.offline import CompileProgress, Compiling, OfflineResult

    wanted = {i.name for i in choose_implementations(op, impl)}
    whole = not (suite or texts)
    cases = tuned(op.name) if whole else choose_cases(op, suite, texts, "core", architecture.arch)
    for implementation in implementations(op.name):
        if implementation.name not in wanted:
            continue
        if type(implementation).demands is Tunable.demands:
            print(f"left out: {implementation.name} does not say what its kernels ask for", file=sys.stderr)
            continue
        progress = CompileProgress(f"{architecture.arch} {op.name} {implementation.name}")
        compiling = Compiling(implementation, architecture, shard, progress)
        searches = compiling.searches(cases)
        compiling.run(searches)
        if searches:
            yield OfflineResult(compiling, searches)


def _write(json_to: str, rows: Sequence[Mapping[str, Any]]) -> None:
    write(json_to, json.dumps({"tuned": rows}, indent=1) + "\n")
