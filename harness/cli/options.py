"""Options that several commands share; and how the options of a command become one object."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from harness.errors import STOPPED, UsageError
from harness.files import write
from shapes.names import near

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import RenderableType

Function = TypeVar("Function", bound=Callable[..., object])
Object = TypeVar("Object", bound="DataclassInstance")


GROUPS = {
    "What": "",
    "How long": "budget per_case resume retry prepare_timeout call_timeout",
    "Where and how": "device devices cluster cache launch set disturbed seed threads config force keep shard",
    "Output": "out json json_to csv csv_to markdown quiet save tuned plan page folder published dry_run "
    "check ledger help _click_default_help",
}
"""Heading in a command's help -> the parameters below it; the first has those that no other names."""


class Command(click.Command):
    """Its help has its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in GROUPS}
        heading_of = {name: heading for heading, names in GROUPS.items() for name in names.split()}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)  # (names, help); None for a hidden option
            if record and not isinstance(param, click.Argument):
                groups[heading_of.get(param.name or "", "What")].append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class OneOf(click.Choice[str]):
    """One of some words, in any capitals."""

    def __init__(self, choices: Sequence[str]) -> None:
        super().__init__(choices, case_sensitive=False)

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        meant = near(str(value), self.choices, cutoff=0.61)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        return f"{value!r} is none of {', '.join(self.choices)}{hint}"


@contextlib.contextmanager
def interruptible(what_next: str) -> Iterator[None]:
    """Control-C ends the command with one line that says how to go on: the text of the KeyboardInterrupt, or
    where that has none `what_next`, which may be empty."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        text = str(stopped) or what_next
        click.echo(f"stopped; {text}" if text else "stopped", err=True)
        sys.exit(STOPPED)


def json_option(help: str) -> Callable[[Function], Function]:
    """The option `--json FILE|-`, whose parameter is `json_to`."""
    return click.option("--json", "json_to", metavar="FILE|-", help=help)


def answer(json_to: str | None, facts: object, shown: Callable[[], RenderableType]) -> None:
    """Writes the facts, or a text of JSON, to the file of --json; without it prints what `shown` returns."""
    from harness.report.terminal import show

    if json_to:
        if isinstance(facts, str):
            write(json_to, facts)
        else:
            write_json(json_to, facts, allow_nan=False)
        return
    text = shown()
    if isinstance(text, str):
        print(text)
    else:
        show(text, sys.stdout)


def write_json(target: str, facts: object, allow_nan: bool = True) -> None:
    """Writes facts to a file, or to stdout for `-`."""
    write(target, json.dumps(facts, indent=1, allow_nan=allow_nan) + "\n")


def _seconds(context: click.Context, option: click.Parameter, text: str) -> float:
    """`900s` -> 900.0. Raises UsageError."""
    from harness.plan.budget import parse_seconds

    return parse_seconds(text, option.opts[0])


def parsed_by(parse: Callable[[Any], object]) -> Callable[[click.Context, click.Parameter, Any], object]:
    """The callback of an option whose value `parse` makes. Its ValueError is a user's mistake."""

    def callback(context: click.Context, option: click.Parameter, value: object) -> object:
        try:
            return parse(value)
        except ValueError as error:
            raise UsageError(str(error)) from None

    return callback


def _cases_file(name: str | None) -> str | None:
    """The name, if it can be that of a file of cases. Raises ValueError if not."""
    if name and not name.endswith(".json"):
        raise ValueError(f"--cases {name}: a file of cases is NAME.json, as `shapes from` writes it")
    return name


only_op = click.option("--op", metavar="OP", help="Take only this op.")
target_device = click.option(
    "--device", metavar="NAME",
    help="Use cpu, cuda, cuda:1, or the first GPU of a kind: MI300X, H200 ...  [default: the first GPU, else "
    "the CPU]",
)  # fmt: skip
ad_hoc_cases = click.option(
    "--case", multiple=True, metavar='"NAME=V[,V...] ..."',
    help="Take these cases, not a suite's. Spaces separate sizes; commas separate values, which multiply.",
)  # fmt: skip
cases_file = click.option(
    "--cases", metavar="FILE", callback=parsed_by(_cases_file),
    help="Take the cases of this file: see `shapes from`.",
)  # fmt: skip
cluster_option = click.option(
    "--cluster", metavar="[ADDRESS]", is_flag=False, flag_value="auto",
    help="Measure cases in parallel on a Ray cluster: HOST:PORT of its head, or without ADDRESS on all "
    "devices of this node. --device then names a type of device.",
)  # fmt: skip
cache_option = click.option(
    "--cache", type=OneOf(["serving", "cold", "warm"]),
    help="Choose what calls read from memory: streamed operands (serving, default), all operands (cold), or "
    "nothing (warm).",
)  # fmt: skip
launch_option = click.option(
    "--launch", type=OneOf(["graph", "eager"]),
    help="Launch calls on GPUs from a graph (default), or one by one (eager).",
)  # fmt: skip
set_option = click.option(
    "--set", multiple=True, metavar="NAME=VALUE", help="Set this environment variable in the workers."
)
disturbed_option = click.option(
    "--disturbed", type=OneOf(["prefer", "keep", "refuse"]), envvar="KERNEL_BENCH_DISTURBED",
    help="Count rounds that other work or throttling disturbed if there are too few quiet ones (prefer, "
    "default), always (keep), or never (refuse: a row that is mostly disturbed gets no time).",
)  # fmt: skip
quiet_option = click.option("--quiet", is_flag=True, help="Print neither tables nor progress.")
seed_option = click.option("--seed", type=int, help="Draw all random values from this seed.  [default: 0]")
threads_option = click.option(
    "--threads", type=click.IntRange(1), metavar="N",
    help="Compute on N CPU threads.  [default: OMP_NUM_THREADS, else the cores of a NUMA node]",
)  # fmt: skip
prepare_timeout = click.option(
    "--prepare-timeout", default="900s", show_default=True, metavar="TIME", callback=_seconds,
    help="Stop preparing an implementation after this.",
)  # fmt: skip
call_timeout = click.option(
    "--call-timeout", default="120s", show_default=True, metavar="TIME", callback=_seconds,
    help="Stop any other request to a worker after this.",
)  # fmt: skip


def several(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """A decorator that adds options to a command, in whose help they stand in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def gathered(path: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command as its first argument an object made of the options that are fields of
    a dataclass, `module:class`, which is imported when the command is called; and the others by name."""
    module, _, name = path.partition(":")

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(*others: object, **options: Any) -> None:  # click passes untyped values
            dataclass = getattr(import_module(module), name)
            gathered_object, own_options = object_of(dataclass, options)
            command(gathered_object, *others, **own_options)

        return call

    return decorate


def object_of(dataclass: type[Object], options: Mapping[str, Any]) -> tuple[Object, dict[str, Any]]:
    """An object of the options that are its fields, and the other options."""
    names = {field.name for field in fields(dataclass)}
    others = {name: value for name, value in options.items() if name not in names}
    return dataclass(**{name: options[name] for name in names & options.keys()}), others


measuring = several(
    click.option("--op", metavar="OP", help="Measure this op: see `list ops`."),
    click.option("--impl", metavar="PATTERN,...",
                 help="Measure only implementations that match: 'vllm.*,torch.sdpa'."),
    click.option("--suite", metavar="NAME", help="Measure these cases: see `list suites`.  [default: smoke]"),
    ad_hoc_cases,
    cases_file,
    click.option("--boundary", metavar="NAME",
                 help="Let a call cover core, with_quant or with_routing.  [default: each in turn]"),
    target_device,
    cluster_option,
    cache_option,
    click.option("--launch", type=OneOf(["graph", "eager", "both"]),
                 help="Launch calls on GPUs from a graph (default), one by one (eager), or both ways."),
    click.option("--budget", metavar="60s",
                 help="Measure for so long, with --resume for so long again; set-up comes on top.  "
                      "[default: 60s]"),
    click.option("--per-case", metavar="20s",
                 help="Give each case that is begun at least this of the budget.  [default: 20s; smoke 3s]"),
    set_option,
    click.option("--resume", metavar="RUN", help="Measure the cases that this run did not finish."),
    click.option("--retry", is_flag=True,
                 help="With --resume: measure again the cases that hold a crash, a timeout or an error."),
    click.option("--out", metavar="DIR",
                 help="Write the run into this folder.  [default: a new one in results/local/]"),
    click.option("--json", metavar="FILE|-", help="Write run, cells and verdicts there; - is stdout."),
    click.option("--csv", metavar="FILE|-", help="Write the cells there; - is stdout."),
    disturbed_option,
    quiet_option,
    seed_option,
    threads_option,
    prepare_timeout,
    call_timeout,
    gathered("harness.run.plan:Request"),
)  # fmt: skip
"""The options of every command that measures; its first argument is a `harness.run.plan.Request`."""
