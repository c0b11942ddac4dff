"""`python -m harness list`: ops, implementations, cases and so on, as a table or JSON."""

from __future__ import annotations

import click

from harness.cli.options import OneOf, answer, json_option, only_op
from harness.errors import UsageError
from kernels.platform import KINDS

LISTS = ["ops", "impls", "cases", "suites", "models", "linears", "published", "flags", "recipes"]


@click.command("list")
@click.argument("what", default="impls", metavar="[WHAT]", type=OneOf(LISTS))
@only_op
@click.option("--case", metavar='"NAME=V ..."',
              help="Say which implementations take this case, and why the others do not. Sizes that it "
              "leaves out are those of the first case of the suite r1-tp8.")  # fmt: skip
@click.option("--suite", metavar="NAME", help="List the cases of this suite, or `all`.  [default: smoke]")
@click.option("--platform", type=OneOf(KINDS), help="Ask about another platform than this machine's.")
@click.option("--arch", default="", metavar="NAME", help="Ask about another GPU: MI300X, H200, gfx942 ...")
@click.option("--all", "every", is_flag=True, help="List the flags that no recipe and no guide sets, too.")
@json_option("Write JSON there instead of a table.")
def list_command(
    what: str, op: str | None, case: str | None, suite: str | None, platform: str | None, arch: str,
    every: bool, json_to: str | None,
) -> None:  # fmt: skip
    """List what there is, and what can run here and why. WHAT is impls (the default), ops, cases, suites,
    models, linears, published, flags or recipes. Models have suites MODEL-tpN, of N ranks, and are
    listed with their sources and what is not modelled of them."""
    import kernels
    from harness.catalogue.architectures import named_architecture
    from harness.plan.select import choose_op
    from harness.report.lists import listing, of_case
    from kernels.engines import kind
    from kernels.platform import detect, named

    ops = [choose_op(op).name] if op else list(kernels.OPS)
    if case and what != "impls":
        raise UsageError("--case is for `list impls`")
    if suite and what != "cases":
        raise UsageError("--suite is for `list cases`")
    arch = named_architecture(arch) if arch else ""
    of_arch = kind(arch)
    if platform and of_arch and of_arch != platform:
        raise UsageError(f"{arch} is an architecture of {of_arch}, not of {platform}")
    platform = platform or of_arch
    machine = named(platform, arch) if platform else detect()
    if case:
        rows, text = of_case(ops, case, machine)
    else:
        rows, text = listing(what, ops, machine, suite, every)
    if not json_to and (what == "impls" or not machine.here):
        where = f"{machine.kind} {machine.arch} {machine.name}".strip()
        print(where if machine.here else f"{where} (not this machine)")
    answer(json_to, rows, lambda: text)
