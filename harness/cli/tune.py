"""`python -m harness tune`: races configurations on a device and stores the winners."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from harness.cli import options
from harness.files import require_writable_folder

if TYPE_CHECKING:
    from harness.tune.race import TuneRequest


@click.command(cls=options.Command)
@options.only_op
@click.option("--impl", metavar="PATTERN,...", help="Race only implementations that match: 'triton.*'.")
@click.option("--suite", metavar="NAME", help="Race only these cases.  [default: those of all suites]")
@options.ad_hoc_cases
@click.option("--shard", metavar="I/N", help="Race only the I-th of N parts of the cases.")
@click.option("--out", "tuned", metavar="DIR", help="Store winners there.  [default: kernels/tuned]")
@click.option("--json", metavar="FILE|-", help="Write the choices there as JSON, too.")
@click.option("--dry-run", is_flag=True, help="Say what would be raced, and how long; race nothing.")
@click.option("--check", is_flag=True,
              help="Store nothing; exit code 1 where a stored choice is not the best.")  # fmt: skip
@options.target_device
@options.launch_option
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Race at most N for a case.  [default: 24]")
@click.option("--budget", metavar="60s", help="Measure for so long.  [default: 30s for each case]")
@click.option("--per-case", metavar="30s", help="Give each case at least this of the budget.  [default: 30s]")
@click.option("--journal", "out", metavar="DIR", help="Record there.  [default: a new one in results/local/]")
@click.option("--resume", metavar="RUN", help="Race the cases that this race did not finish.")
@click.option("--retry", is_flag=True, help="With --resume: race cases again where something failed.")
@options.disturbed_option
@options.prepare_timeout
@options.call_timeout
@options.cluster_option
@options.gathered("harness.tune.race:TuneRequest")
def tune(request: TuneRequest) -> None:
    """Race configurations of tunable kernels and store the winners.

    For each case the configuration that is used now is raced against --keep others: first those that are used
    for neighbouring sizes, then others in a random order. Those that exceed what the GPU has are left out.
    Each is checked and measured as `run` does, and one is stored if it is faster than what was used before.
    Runs read what is stored in kernels/tuned, and before it the folder that KERNEL_BENCH_TUNED names.

    Triton kernels of vLLM and SGLang are raced where --impl names them (vllm.triton, sglang.triton): against
    what the engine takes now, from its table or by default. Winners go into --out as the engine's tables.
    Where nothing is faster, the engine's own configuration stays.
    """
    import kernels
    from harness.cli.run_display import RaceTables
    from harness.plan.budget import parse_shard
    from harness.tune import race

    kernels.import_plugins()  # their configurations are looked at in this process
    parse_shard(request.shard)
    with options.interruptible("finished cases are stored, tune --resume RUN races the rest"):
        if request.stores:
            require_writable_folder(request.folder, "; give another by --out")
        with RaceTables() as display:
            if request.cluster and not request.dry_run:
                from harness.cluster.execute import race_on_cluster

                code, rows = race_on_cluster(request, display)
            else:
                code, rows = race.tune(request, display)
        if request.json:
            options.write_json(request.json, {"tuned": rows})
        sys.exit(code)
