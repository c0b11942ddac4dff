"""`python -m harness list`: ops, implementations, cases and so on, as a table or JSON."""

from __future__ import annotations

import click

from harness.cli.options import answer, json_option, only_op
from kernels.platform import KINDS

LISTS = ["ops", "impls", "cases", "suites", "linears", "published", "flags", "recipes"]


@click.command("list")
@click.argument("what", default="impls", type=click.Choice(LISTS))
@only_op
@click.option(
    "--case",
    metavar='"NAME=V ..."',
    help="For impls of --op: which take this case, and why the others do not.",
)
@click.option(
    "--suite",
    default=None,
    help="For cases: those of this suite, or of all suites with `all` (default: smoke).",
)
@click.option("--platform", type=click.Choice(KINDS), help="Another platform than that of this machine.")
@click.option("--arch", default="", help="Another architecture or GPU: sm_90, gfx942, x86-amx, MI300X ...")
@click.option("--all", "every", is_flag=True, help="For flags: also those that no recipe and no guide sets.")
@json_option("Write JSON there instead of a table.")
def list_command(
    what: str,
    op: str | None,
    case: str | None,
    suite: str | None,
    platform: str | None,
    arch: str,
    every: bool,
    json_to: str | None,
) -> None:
    """List what the suite has, and what can run here, with reasons."""
    import kernels
    from harness.catalogue.devices import known_devices
    from harness.errors import UsageError
    from harness.plan.select import choose_op
    from harness.report.lists import listing, of_case
    from kernels.engines import kind
    from kernels.platform import detect, named

    ops = [choose_op(op).name] if op else list(kernels.OPS)
    if case and (what != "impls" or op is None):
        raise UsageError("--case is for `list impls --op OP`")
    sheets = known_devices()
    arch = next((sheet["arch"] for sheet in sheets if sheet["name"].lower() == arch.lower()), arch)
    of_arch = kind(arch)
    if platform and of_arch and of_arch != platform:
        raise UsageError(f"{arch} is an architecture of {of_arch}, not of {platform}")
    platform = platform or of_arch
    if arch and not platform:
        raise UsageError(f"the platform of {arch!r} is not known; name it by --platform")
    machine = named(platform, arch) if platform else detect()
    rows, shown = of_case(ops[0], case, machine) if case else listing(what, ops, machine, suite, every)
    if not json_to and (what == "impls" or not machine.here):
        elsewhere = "" if machine.here else " (not this machine)"
        print(f"{machine.kind} {machine.arch} {machine.name}".strip() + elsewhere)
    answer(json_to, rows, shown)
