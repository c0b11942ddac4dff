"""The command line. Imports nothing heavy: `--help` and `list` start at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from harness.cli.serving import serving
from harness.errors import STOPPED, USAGE, HarnessError
from kernels import PluginError
from kernels.platform import KINDS
from kernels.tuning import StoredError

LISTS = ["ops", "impls", "cases", "suites", "linears", "published", "flags", "recipes"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """Which implementation of DeepSeek's inference kernels is fastest here, and is it right?

    \b
    python -m harness run --op mla_decode                    rank the implementations at a few small shapes
    python -m harness run --op mla_decode --suite r1-tp8     ... at DeepSeek-R1's shapes on one of 8 GPUs
    python -m harness run --op mla_decode --case "batch=1,64 ctx=4096 heads=16"
    python -m harness run --op fused_moe --boundary with_quant
    python -m harness list impls                             what there is, what it needs, what can run here
    python -m harness compile                                the Triton kernels, for GPUs not at hand
    python -m harness tune --op mla_decode                   their best configurations, stored for runs

    Exit codes: 0 all that could run is right; 1 something was wrong, crashed, timed out or must not be
    shipped; 2 the command cannot be understood or an input not read; 3 nothing could run.
    """


@cli.command("list")
@click.argument("what", default="impls", type=click.Choice(LISTS))
@click.option("--op", help="Only this op.")
@click.option("--suite", default=None, help="For cases: of this suite, or all (default: smoke).")
@click.option("--platform", type=click.Choice(KINDS), help="Ask about another platform than this machine.")
@click.option("--arch", default="", help="Its architecture: sm_90, sm_100, gfx942, gfx950, x86-amx ...")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
def list_command(**options: Any) -> None:
    """What there is, and what can run here, with reasons."""
    from harness.report.lists import show

    show(**options)


@cli.command()
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of text.")
@click.option("--device", help="cpu, cuda, cuda:1 ... (default: the first GPU, else the CPU).")
@click.option("--quick", is_flag=True, help="Measure nothing (measuring takes about half a minute).")
def doctor(**options: Any) -> None:
    """Platform, device, libraries, ceilings, noise, clocks, and what would improve them."""
    from harness.cli.doctor import show

    show(**options)


@cli.command()
@click.argument("runs", nargs=-1)
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
def claims(runs: tuple[str, ...], json_to: str | None) -> None:
    """What AITER's headline claims (2x GEMM, 3x MoE, 17x MLA decode, 14x MHA prefill) come to in recorded
    RUNS (default: all under results/)."""
    from harness.cli.claims import show

    show(runs, json_to)


@cli.command("compile")
@click.option("--target", metavar="ARCH,...", help="gfx942, gfx950, sm_90, sm_100 (default: all).")
@click.option("--op", help="Only this op.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
def compile_command(**options: Any) -> None:
    """Compile the suite's Triton kernels as they are shipped, for GPUs that need not be here; exit code 1
    where one exceeds a limit, spills, or does without the matrix instructions it could have."""
    from harness.cli.compile import show

    sys.exit(show(**options))


def _seconds(context: click.Context, option: click.Parameter, text: str) -> float:
    from harness.plan.budget import parse_seconds

    return parse_seconds(text, option.opts[0])


def measuring(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that measures."""
    for option in reversed(MEASURING):
        command = option(command)
    return command


MEASURING = [
    click.option("--op", help="The op to measure."),
    click.option(
        "--impl", metavar="PATTERN,...", help="Only implementations that match ('vllm.*,torch.sdpa')."
    ),
    click.option("--suite", help="Named cases (default: smoke); see `list suites`."),
    click.option(
        "--case", multiple=True, metavar='"NAME=V[,V...] ..."', help="Ad hoc cases; lists multiply."
    ),
    click.option("--boundary", help="What the timed call covers: core, with_quant, with_routing."),
    click.option("--device", help="cpu, cuda, cuda:1 ... (default: the first GPU, else the CPU)."),
    click.option(
        "--cache",
        type=click.Choice(["serving", "cold", "warm"]),
        help="Streamed operands from memory (default); all operands; or nothing moved out of the cache.",
    ),
    click.option("--launch", type=click.Choice(["graph", "eager", "both"]), help="On GPUs (default: graph)."),
    click.option("--budget", metavar="60s", help="Time for measuring, set-up apart.  [default: 60s]"),
    click.option(
        "--per-case", metavar="20s", help="Least of it that is worth a case.  [default: 20s; smoke 3s]"
    ),
    click.option("--set", multiple=True, metavar="NAME=VALUE", help="Environment of the workers."),
    click.option("--resume", metavar="RUN", help="Measure what this run did not finish."),
    click.option(
        "--retry",
        is_flag=True,
        help="With --resume: measure cases with cells that failed (crashed, timeout, error) again.",
    ),
    click.option("--out", metavar="DIR", help="The run's folder (default: a new one under results/local/)."),
    click.option("--json", metavar="FILE|-", help="Write run, cells and verdicts there; - is stdout."),
    click.option("--csv", metavar="FILE|-", help="Write the cells there."),
    click.option(
        "--disturbed",
        type=click.Choice(["drop", "keep"]),
        envvar="KERNEL_BENCH_DISTURBED",
        help="Rounds that other work or throttling disturbed: made again (default), or counted.",
    ),
    click.option("--quiet", is_flag=True, help="No tables and no progress."),
    click.option("--seed", type=int, help="Of operands and orders (default: 0)."),
    click.option(
        "--threads",
        type=click.IntRange(1),
        help="CPU threads (default: OMP_NUM_THREADS, else the cores of a NUMA node).",
    ),
    click.option(
        "--prepare-timeout", default="900s", callback=_seconds, show_default=True, help="To prepare one."
    ),
    click.option(
        "--call-timeout", default="120s", callback=_seconds, show_default=True, help="For one request."
    ),
]


@cli.command("tune")
@click.option("--op", help="Only this op.")
@click.option("--impl", metavar="PATTERN,...", help="Only implementations that match ('triton.split_k').")
@click.option("--suite", help="Only these cases (default: those of five suites that span the others).")
@click.option("--case", multiple=True, metavar='"NAME=V[,V...] ..."', help="Ad hoc cases; lists multiply.")
@click.option("--target", metavar="ARCH,...", help="Compile for gfx942, gfx950, sm_90, sm_100.")
@click.option("--shard", metavar="I/N", help="Compile into the cache, or race, the I-th of N parts only.")
@click.option("--out", metavar="DIR", help="Where to store (default: kernels/tuned, which runs read).")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
@click.option("--check", is_flag=True, help="Store nothing; exit code 1 where the stored is not the best.")
@click.option("--device", help="Race on cpu, cuda, cuda:1 ... (default: the first GPU, else the CPU).")
@click.option("--launch", type=click.Choice(["graph", "eager"]), help="Of races on GPUs (default: graph).")
@click.option("--keep", type=click.IntRange(1), help="Race so many of a case, by the estimate (default: 24).")
@click.option("--budget", metavar="60s", help="Time for measuring a race (default: 30s for each case).")
@click.option("--per-case", metavar="30s", help="Least of it that is worth a case (default: 30s).")
@click.option("--journal", metavar="DIR", help="The race's rounds (default: a new folder in results/local/).")
@click.option("--resume", metavar="RUN", help="Race what this race did not finish.")
@click.option("--retry", is_flag=True, help="With --resume: cases where something failed again.")
@click.option("--disturbed", type=click.Choice(["drop", "keep"]), envvar="KERNEL_BENCH_DISTURBED",
              help="As of `run`.")  # fmt: skip
@click.option("--prepare-timeout", default="900s", callback=_seconds, help="As of `run`.")
@click.option("--call-timeout", default="120s", callback=_seconds, help="As of `run`.")
def tune_command(**options: Any) -> None:
    """Choose configurations of tunable kernels, the suite's Triton kernels among them.

    Where they can be timed they are raced: those that compiling leaves, by an estimate of their time
    (harness/tune/cost_model.py), are checked and measured as `run` does, and a challenger is stored if it is
    faster than what was used before (harness/timing/successive_halving.py). Elsewhere, or with --target, the
    estimate chooses. Runs read what is stored in kernels/tuned, and before it the folder that
    KERNEL_BENCH_TUNED names.
    """
    from harness.cli.tune import show

    try:
        sys.exit(show(**options))
    except KeyboardInterrupt:
        click.echo("stopped; finished cases are stored, tune --resume RUN races the rest", err=True)
        sys.exit(STOPPED)


@cli.command()
@measuring
@click.option("--baseline", help="Compare with this one (default: the op's best torch implementation).")
@click.option("--published", is_flag=True, help="Show what others published of these cases, unranked.")
def run(**options: Any) -> None:
    """Rank implementations of an op: each checked against a reference, then timed in interleaved rounds."""
    from harness.cli.run import RunDisplay
    from harness.run.execute import run as run_request
    from harness.run.request import Request

    request = Request(**options)
    _measured(lambda: run_request(request, RunDisplay(request)))


@cli.command()
@click.option(
    "--flag",
    "flags",
    multiple=True,
    metavar="NAME=A[,B...]",
    help="A variable and its values; NAME= is empty, `unset` takes it away.",
)
@click.option(
    "--design",
    type=click.Choice(["factorial", "one-at-a-time"]),
    default="factorial",
    show_default=True,
    help="All combinations of the flags' values, or each value alone.",
)
@click.option(
    "--recipe", metavar="NAME", help="All variables of a documented environment; see `list recipes`."
)
@click.option("--leave-one-out", is_flag=True, help="The recipe without each of its variables in turn.")
@click.option("--force", is_flag=True, help="Set what cannot show anything here, or nobody knows, too.")
@measuring
def toggle(
    flags: tuple[str, ...],
    design: str,
    recipe: str | None,
    leave_one_out: bool,
    force: bool,
    **options: Any,
) -> None:
    """What environment flags do to each implementation, and whether they changed what ran; `list flags` says
    what each flag acts on."""
    from harness.cli.toggle import toggle as toggle_request
    from harness.run.request import Request

    _measured(lambda: toggle_request(Request(**options), flags, design, recipe, leave_one_out, force))


@cli.command()
@click.argument("runs", nargs=-1, metavar="[RUN_A RUN_B]")
@click.option("--revisions", nargs=2, metavar="A B", help="Measure two commits' kernels now, interleaved.")
@click.option("--force", is_flag=True, help="Compare what differs in machine or terms too, and mark it.")
@click.option("--markdown", metavar="FILE|-", help="Write the report there too, for a pull request.")
@measuring
def compare(
    runs: tuple[str, ...],
    revisions: tuple[str, str] | None,
    force: bool,
    markdown: str | None,
    **options: Any,
) -> None:
    """What became faster or slower between two recorded runs, or between two revisions of this repository
    (to which the options from --op on apply). Exit code 1 where something regressed."""
    from harness.cli.compare import compare as compare_runs
    from harness.cli.compare import compare_revisions
    from harness.run.request import Request

    if revisions and not runs:
        _measured(lambda: compare_revisions(revisions, Request(**options)))
    if len(runs) != 2 or revisions:
        raise click.UsageError("name two runs, or --revisions A B and an --op")
    sys.exit(compare_runs(*runs, force, markdown))


@cli.command()
@click.argument("run")
@click.option("-o", "--output", metavar="FILE|-", help="Default: benchmark.json in the run's folder.")
def export(run: str, output: str | None) -> None:
    """A recorded RUN as another tool's file: `pytest-benchmark compare` reads it."""
    from harness.results.export import export as write

    sys.exit(write(run, output))


cli.add_command(serving)


def _measured(command: Callable[[], int]) -> None:
    try:
        sys.exit(command())
    except KeyboardInterrupt:
        click.echo("stopped; finished cases are recorded, --resume RUN measures the rest", err=True)
        sys.exit(STOPPED)


def main() -> int:
    """Runs the command; a user's mistake is one line on stderr and an exit code."""
    try:
        cli(standalone_mode=False)
    except HarnessError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except (PluginError, StoredError) as error:
        click.echo(f"error: {error}", err=True)
        return USAGE
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USAGE
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        return STOPPED
    return 0
