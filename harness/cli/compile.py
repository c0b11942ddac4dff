"""`python -m harness compile`: the suite's Triton kernels compiled for GPUs that need not be here."""

from __future__ import annotations

import sys

import click

from harness.cli.options import answer, json_option, only_op


@click.command("compile")
@click.option("--target", metavar="ARCH,...", help="gfx942, gfx950, sm_90, sm_100 (default: all).")
@only_op
@click.option(
    "--cluster",
    metavar="[ADDRESS]",
    is_flag=False,
    flag_value="auto",
    help="Compile on the CPUs of a Ray cluster: HOST:PORT of its head.",
)
@json_option("Write JSON there instead of a table.")
def compile_command(target: str | None, op: str | None, cluster: str | None, json_to: str | None) -> None:
    """Compile the suite's Triton kernels as they are shipped, for GPUs that need not be here. The exit code
    is 1 where one exceeds a limit, spills, or lacks the matrix instructions that it could have."""
    import kernels
    from harness.catalogue.architectures import select_architectures
    from harness.compile.survey import able, compiles
    from harness.errors import FAILED, OK, NothingRan
    from harness.plan.select import choose_op
    from harness.report.compile_table import compile_table

    kernels.import_plugins()  # their sources are compiled, too
    ops = [choose_op(op).name] if op else list(kernels.OPS)
    targets = able(select_architectures(target))
    compile_each = None
    if cluster:
        from harness.cluster.ray_cluster import compile_on

        compile_each = compile_on(cluster)
    rows = compiles(ops, targets, compile_each)
    if not rows:
        raise NothingRan(f"no case of {', '.join(ops)} is one that a Triton kernel takes")
    import triton

    facts = {"triton": triton.__version__, "compiles": rows}
    answer(json_to, facts, lambda: compile_table(rows))
    bad = [row for row in rows if not row["ok"]]
    for row in bad:
        name = f"{row['target']} {row['op']} {row['kernel']} {row['config']}"
        click.echo(f"{name}: {row['reason']}", err=True)
    count = f"{len(rows)} configurations compiled by Triton {triton.__version__}"
    click.echo(f"{count}, {len(bad)} must not be shipped", err=True)
    sys.exit(FAILED if bad else OK)
