"""`python -m harness compile`: the suite's Triton kernels compiled for GPUs that need not be here."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from harness.cli.options import answer, json_option, only_op
from harness.errors import FAILED, OK, NothingRan, UsageError

if TYPE_CHECKING:
    from harness.compile.compiler import CompileEach, Resources
    from harness.compile.launches import KernelLaunch

FIRST_S = 300.0  # seconds for a cluster to compile its first kernel


@click.command("compile")
@click.option("--target", metavar="GPU,...", help="Compile for MI300X, sm_100 ...  [default: all known]")
@only_op
@click.option("--cluster", metavar="[ADDRESS]", is_flag=False, flag_value="auto",
              help="Compile on the CPUs of the Ray cluster whose head is at HOST:PORT.")  # fmt: skip
@json_option("Write JSON there instead of a table.")
def compile_command(target: str | None, op: str | None, cluster: str | None, json_to: str | None) -> None:
    """Compile the Triton kernels for GPUs that need not be here. The exit code is 1 where one exceeds a
    limit, spills, or lacks matrix instructions that it could have."""
    import kernels
    from harness.catalogue.architectures import select_architectures
    from harness.compile.survey import compiled_rows, require_compiler
    from harness.plan.select import choose_op
    from harness.report.compile_table import compile_lines
    from harness.report.fitting_table import table_of

    kernels.import_plugins()  # their sources are compiled, too
    ops = [choose_op(op).name] if op else list(kernels.OPS)
    targets = require_compiler(select_architectures(target))
    rows = compiled_rows(ops, targets, compile_on(cluster) if cluster else None)
    if not rows:
        raise NothingRan(f"no case of {', '.join(ops)} is one that a Triton kernel takes")
    import triton

    facts = {"triton": triton.__version__, "compiles": rows}
    answer(json_to, facts, lambda: table_of(compile_lines(rows)))
    refused = [row for row in rows if not row["ok"]]
    for row in refused:
        name = f"{row['target']} {row['op']} {row['kernel']} {row['config']}"
        click.echo(f"{name}: {row['reason']}", err=True)
    count = f"{len(rows)} configurations compiled by Triton {triton.__version__}"
    click.echo(f"{count}, {len(refused)} must not be shipped", err=True)
    sys.exit(FAILED if refused else OK)


def compile_on(address: str) -> CompileEach:
    """Returns a function that compiles launches on the CPUs of a cluster, or raises UsageError: where a node
    has another Triton, or none gives a CPU. Without a cluster this raises NothingRan or UsageError."""
    from harness.cluster.ray_cluster import join, require_head
    from harness.compile.compiler import Resources
    from kernels.platform import version

    ray = join(address)
    head = ray.get_runtime_context().gcs_address

    def compile_each(todo: Mapping[str, KernelLaunch]) -> Iterator[tuple[str, Resources]]:
        task = ray.remote(compiled).options(num_cpus=1, max_retries=2)
        waiting = {task.remote(launch, version("triton")): key for key, launch in todo.items()}
        deadline = time.monotonic() + FIRST_S
        while waiting:
            require_head(head)
            ready, _ = ray.wait(list(waiting), timeout=2)
            if len(waiting) == len(todo) and not ready and time.monotonic() > deadline:
                raise UsageError(f"no kernel was compiled within {FIRST_S:g} s: are all CPUs taken?")
            for reference in ready:
                try:
                    resources = ray.get(reference)
                except ray.exceptions.RayError as error:
                    resources = Resources(error=f"compiling failed: its node gave {type(error).__name__}")
                if isinstance(resources, str):  # the node has another Triton
                    raise UsageError(resources)
                yield waiting.pop(reference), resources

    return compile_each


def compiled(launch: KernelLaunch, triton: str | None) -> Resources | str:
    """Compiles a launch on a node; returns a text if the node's Triton is not the driver's, `triton`."""
    from harness.compile.compiler import compile_launch
    from kernels.platform import version

    here = version("triton")
    if here != triton:
        host = socket.gethostname()
        return f"{host} has triton {here or 'missing'}, the driver's machine {triton}: make them alike"
    return compile_launch(launch.kernel, launch.arch, launch.data)
