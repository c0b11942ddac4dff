"""Offline choices of a command: what it names, compiled for an architecture and ranked by estimated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.catalogue.architectures import Architecture
from harness.compile.compiler import CompileEach
from harness.compile.launches import implementations, tuned
from harness.plan.select import choose_cases, choose_implementations
from harness.tune.offline import CompileProgress, Compiling, OfflineResult
from harness.tune.race import TuneRequest
from kernels.op import Op
from kernels.tuning import Tunable


def offline_choices(
    op: Op,
    request: TuneRequest,
    architecture: Architecture,
    log: Callable[[str], None],
    compile_each: CompileEach | None = None,
) -> Iterator[OfflineResult]:
    """One for each implementation that takes a case. Raises UsageError for what the request names and is not
    there.

    log:          is told who is left out
    compile_each: as of `harness.compile.compiler.compile_all`
    """
    names = {i.name for i in choose_implementations(op, request.impl)}
    if request.suite or request.case:
        cases = choose_cases(op, request.suite, request.case, "core", architecture.arch)
    else:
        cases = tuned(op.name)
    for implementation in implementations(op.name):
        if implementation.name not in names:
            continue
        if type(implementation).demands is Tunable.demands:
            log(f"left out: {implementation.name} does not say what its kernels ask for")
            continue
        progress = CompileProgress(f"{architecture.arch} {op.name} {implementation.name}")
        compiling = Compiling(implementation, architecture, request.shard, progress, compile_each)
        searches = compiling.searches(cases)
        compiling.run(searches)
        if searches:
            yield OfflineResult(compiling, searches)
