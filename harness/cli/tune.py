"""`python -m harness tune`: which configuration each case is to run with, raced or compiled, and stored."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.interrupt import interruptible
from harness.cli.options import (
    ad_hoc_cases,
    cluster_option,
    compiling_on,
    gathered,
    json_option,
    only_op,
    seconds_option,
)

if TYPE_CHECKING:
    from harness.compile.compiler import CompileEach
    from harness.tune.race import RaceRequest, Row, TuneRequest


def _race_request() -> type[RaceRequest]:
    from harness.tune.race import RaceRequest

    return RaceRequest


@click.command()
@only_op
@click.option("--impl", metavar="PATTERN,...", help="Only implementations that match ('triton.split_k').")
@click.option("--suite", help="Only these cases (default: those of five suites that span the others).")
@ad_hoc_cases
@click.option("--target", metavar="ARCH,...", help="Compile for gfx942, gfx950, sm_90, sm_100.")
@click.option("--shard", metavar="I/N", help="Compile into the cache, or race, the I-th of N parts only.")
@click.option("--out", metavar="DIR", help="Where to store (default: kernels/tuned, which runs read).")
@json_option("Write JSON there instead of a table.")
@click.option("--dry-run", is_flag=True, help="Say what would be raced, and how long; race nothing.")
@click.option("--check", is_flag=True, help="Store nothing; exit code 1 where the stored is not the best.")
@click.option("--device", help="Race on cpu, cuda, cuda:1 ... (default: the first GPU, else the CPU).")
@click.option("--launch", type=click.Choice(["graph", "eager"]), help="Of races on GPUs (default: graph).")
@click.option("--keep", type=click.IntRange(1), help="Race so many of a case, by the estimate (default: 24).")
@click.option("--budget", metavar="60s", help="Time for measuring a race (default: 30s for each case).")
@click.option("--per-case", metavar="30s", help="Least of it that is worth a case (default: 30s).")
@click.option("--journal", metavar="DIR", help="The race's rounds (default: a new folder in results/local/).")
@click.option("--resume", metavar="RUN", help="Race what this race did not finish.")
@click.option("--retry", is_flag=True, help="With --resume: cases where something failed again.")
@click.option("--disturbed", type=click.Choice(["prefer", "keep", "refuse"]), envvar="KERNEL_BENCH_DISTURBED",
              help="As of `run`.")  # fmt: skip
@seconds_option("--prepare-timeout", "900s", "As of `run`.", show_default=False)
@seconds_option("--call-timeout", "120s", "As of `run`.", show_default=False)
@cluster_option
@gathered(_race_request)
def tune(
    race: RaceRequest,
    op: str | None,
    impl: str | None,
    suite: str | None,
    case: Sequence[str],
    target: str | None,
    shard: str | None,
    out: str | None,
    json_to: str | None,
    dry_run: bool,
    check: bool,
    cluster: str | None,
) -> None:
    """Choose configurations of tunable kernels, the suite's Triton kernels among them.

    Where they can be timed they are raced: those that compiling leaves, by an estimate of their time
    (harness/tune/cost_model.py), are checked and measured as `run` does, and a challenger is stored if it is
    faster than what was used before (harness/timing/successive_halving.py). Elsewhere, or with --target, the
    estimate chooses. Runs read what is stored in kernels/tuned, and before it the folder that
    KERNEL_BENCH_TUNED names.

    vLLM's and SGLang's Triton kernels are raced where --impl names them (vllm.triton, sglang.triton): against
    what the engine takes at present, of its table or by default. What is faster goes into --out as the
    engine's tables; where nothing is, its own is left.
    """
    import kernels
    from harness.cli.run_display import RaceTables
    from harness.files import require_writable_folder
    from harness.plan.budget import parse_shard
    from harness.tune.race import TuneRequest, race_if_possible
    from kernels.tuning import TUNED

    kernels.import_plugins()  # their configurations are looked at here
    folder = Path(out) if out else TUNED
    request = TuneRequest(op, impl, suite, case, parse_shard(shard), folder, dry_run)
    with interruptible("finished cases are stored, tune --resume RUN races the rest"):
        if not (check or shard or dry_run):
            require_writable_folder(request.folder, "; give another by --out")
        compiling = "--target" if target else "--check" if check else ""
        with RaceTables() as display:
            if cluster and not compiling and not dry_run:
                from harness.cluster.race import race_on_cluster

                raced: tuple[int, list[Row]] | None = race_on_cluster(request, race, cluster, display)
            else:
                raced = race_if_possible(request, race, compiling, display)
        if raced is None:
            compile_each = compiling_on(cluster)
            sys.exit(_tune_offline(request, target, check, shard is None, json_to, compile_each))
        code, rows = raced
        if json_to:
            _write(json_to, rows)
        sys.exit(code)


def _tune_offline(
    request: TuneRequest,
    target: str | None,
    check: bool,
    whole: bool,
    json_to: str | None,
    compile_each: CompileEach | None,
) -> int:
    """Chooses by compiling, prints the choices, and stores them or holds them against what is stored; gives
    the exit code. whole: this process compiles all, not a part of it, whose choices wait for the others."""
    import kernels
    from harness.catalogue.architectures import select_architectures
    from harness.compile.survey import able
    from harness.errors import FAILED, OK, NothingRan
    from harness.plan.select import choose_op
    from harness.report.terminal import show
    from harness.report.tune_table import tune_tables
    from harness.tune.offline_choices import offline_choices

    rows, differences = [], []
    targets = able(select_architectures(target))
    for name in [choose_op(request.op).name] if request.op else list(kernels.OPS):
        for architecture in targets:
            for result in offline_choices(kernels.OPS[name], request, architecture, _log, compile_each):
                rows += result.rows
                if check:
                    differences += result.differences(request.folder)
                elif whole:
                    _log(f"stored {result.store(request.folder)}")
    if not rows:
        raise NothingRan(
            "no case is one that a Triton implementation of these takes; engines' rows are raced on GPUs"
        )
    if json_to:
        _write(json_to, rows)
    elif whole:
        show(tune_tables(rows), sys.stdout)
    for line in differences:
        _log(line)
    return FAILED if differences else OK


def _log(line: str) -> None:
    print(line, file=sys.stderr)


def _write(json_to: str, rows: Sequence[Mapping[str, object]]) -> None:
    import json

    from harness.files import write

    write(json_to, json.dumps({"tuned": rows}, indent=1) + "\n")
