"""Options that several commands share; and how the options of a command become one object."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from harness.errors import STOPPED, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import RenderableType

RECORDED = "finished cases are recorded, --resume RUN measures the rest"
"""Where the folder is not known here: of a cluster."""

Function = TypeVar("Function", bound=Callable[..., object])
Object = TypeVar("Object", bound="DataclassInstance")


@contextlib.contextmanager
def interruptible(what_next: str) -> Iterator[None]:
    """Control-C ends the command and says what is kept and how to go on, if anything is: with the text of the
    KeyboardInterrupt, if it has one."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        click.echo("; ".join(filter(None, ["stopped", str(stopped) or what_next])), err=True)
        sys.exit(STOPPED)


def json_option(help: str) -> Callable[[Function], Function]:
    """The option `--json FILE|-`, whose parameter is `json_to`."""
    return click.option("--json", "json_to", metavar="FILE|-", help=help)


def answer(json_to: str | None, facts: object, shown: Callable[[], RenderableType]) -> None:
    """Writes the facts where --json asks for it; else prints what `shown` makes for people. A text is printed
    as it is."""
    from harness.report.terminal import show

    if json_to:
        write_json(json_to, facts, allow_nan=False)
        return
    text = shown()
    if isinstance(text, str):
        print(text)
    else:
        show(text, sys.stdout)


def write_json(target: str, facts: object, allow_nan: bool = True) -> None:
    """Writes the facts to a file, or to stdout for `-`."""
    from harness.files import write

    write(target, json.dumps(facts, indent=1, allow_nan=allow_nan) + "\n")


def _seconds(context: click.Context, option: click.Parameter, text: str) -> float:
    from harness.plan.budget import parse_seconds

    return parse_seconds(text, option.opts[0])


_time_option = functools.partial(click.option, show_default=True, callback=_seconds)


def parsed_by(parse: Callable[[Any], object]) -> Callable[[click.Context, click.Parameter, Any], object]:
    """The callback of an option whose value `parse` makes from the text; its ValueError is a user's
    mistake."""

    def callback(context: click.Context, option: click.Parameter, value: object) -> object:
        try:
            return parse(value)
        except ValueError as error:
            raise UsageError(str(error)) from None

    return callback


only_op = click.option("--op", help="Only this op.")
target_device = click.option("--device", help="cpu, cuda, cuda:1 ... (default: the first GPU, else the CPU).")
ad_hoc_cases = click.option(
    "--case", multiple=True, metavar='"NAME=V[,V...] ..."', help="Ad hoc cases; lists multiply."
)
cluster_option = click.option(
    "--cluster",
    metavar="[ADDRESS]",
    is_flag=False,
    flag_value="auto",
    help="Measure cases in parallel on a Ray cluster: HOST:PORT of its head, or without ADDRESS on all "
    "devices of this node. --device is then a type of device.",
)
cache_option = click.option(
    "--cache",
    type=click.Choice(["serving", "cold", "warm"]),
    help="What calls read from memory: streamed operands (serving, default), all operands (cold), or "
    "nothing (warm).",
)
set_option = click.option(
    "--set", multiple=True, metavar="NAME=VALUE", help="An environment variable of the workers."
)
disturbed_option = click.option(
    "--disturbed",
    type=click.Choice(["prefer", "keep", "refuse"]),
    envvar="KERNEL_BENCH_DISTURBED",
    help="Rounds that other work or throttling disturbed count if there are too few quiet ones (prefer, "
    "default), always (keep), or never (refuse: no time if most rounds are disturbed).",
)
quiet_option = click.option("--quiet", is_flag=True, help="No tables and no progress.")
seed_option = click.option("--seed", type=int, help="The seed of all random choices (default: 0).")
threads_option = click.option(
    "--threads",
    type=click.IntRange(1),
    help="CPU threads (default: OMP_NUM_THREADS, else the cores of a NUMA node).",
)
prepare_timeout = _time_option(
    "--prepare-timeout", default="900s", help="The most time to prepare an implementation."
)
call_timeout = _time_option(
    "--call-timeout", default="120s", help="The most time for one request to a worker."
)

MEASURING = [
    click.option("--op", help="The op to measure."),
    click.option(
        "--impl", metavar="PATTERN,...", help="Only implementations that match ('vllm.*,torch.sdpa')."
    ),
    click.option("--suite", help="Named cases (default: smoke); see `list suites`."),
    ad_hoc_cases,
    click.option("--boundary", help="What the timed call covers: core, with_quant, with_routing."),
    target_device,
    cluster_option,
    cache_option,
    click.option("--launch", type=click.Choice(["graph", "eager", "both"]), help="On GPUs (default: graph)."),
    click.option("--budget", metavar="60s", help="Time for measuring, without set-up.  [default: 60s]"),
    click.option(
        "--per-case", metavar="20s", help="The least of the budget for a case.  [default: 20s; smoke 3s]"
    ),
    set_option,
    click.option("--resume", metavar="RUN", help="Measure the cases that this run did not finish."),
    click.option(
        "--retry",
        is_flag=True,
        help="With --resume: also measure cases again in which a cell failed (crashed, timeout, error).",
    ),
    click.option("--out", metavar="DIR", help="The run's folder (default: a new one under results/local/)."),
    click.option("--json", metavar="FILE|-", help="Write run, cells and verdicts there; - is stdout."),
    click.option("--csv", metavar="FILE|-", help="Write the cells there."),
    disturbed_option,
    quiet_option,
    seed_option,
    threads_option,
    prepare_timeout,
    call_timeout,
]


def measuring(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of every command that measures; they become a Request."""
    command = gathered("harness.run.plan:Request")(command)
    for option in reversed(MEASURING):
        command = option(command)
    return command


def gathered(path: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes one object of those options of a command that are fields of a dataclass; it is the command's
    first argument.

    path: `module:class` of the dataclass, which is imported when the command is called
    """
    module, _, name = path.partition(":")

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(*others: object, **options: Any) -> None:  # click passes untyped values
            dataclass = getattr(import_module(module), name)
            command(object_of(dataclass, options), *others, **options)

        return call

    return decorate


def object_of(dataclass: type[Object], options: dict[str, Any]) -> Object:
    """Makes an object of a dataclass from the options that are its fields, and takes them out of the
    options."""
    names = {field.name for field in fields(dataclass)} & options.keys()
    return dataclass(**{name: options.pop(name) for name in names})
