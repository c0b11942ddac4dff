"""`python -m harness serving predict`: TPOT, TTFT and throughput from the times of kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from harness.cli.options import json_option
from harness.errors import UsageError
from harness.files import require_writable, write

if TYPE_CHECKING:
    from harness.serving.link.load import Load
    from harness.serving.link.model import Link

Function = TypeVar("Function", bound=Callable[..., object])
KV = {"bf16": "bfloat16", "fp8": "fp8"}
LENGTHS = re.compile(r"(\d+)/(\d+)(?:/(\d+\.?\d*|\.\d+))?")
PARALLEL = re.compile(r"tp(\d+)(?:[ ,+]*ep(\d+))?")
OF_SYSTEM = [
    click.option(
        "--hardware", metavar="NAME", default="", help="The machine.  [default: that of --times, or H200]"
    ),
    click.option("--engine", metavar="NAME", default="", help="[default: that of --times, or sglang]"),
    click.option(
        "--parallel", metavar="tpN[,epN]", default="tp8", show_default=True, help="Over how many GPUs."
    ),
    click.option("--kv-dtype", type=click.Choice([*KV]), default="bf16", show_default=True),
    click.option(
        "--lengths",
        metavar="IN/OUT[/RATIO]",
        default="1024/1024",
        show_default=True,
        help="Tokens of a request at most; each length is drawn from RATIO (0.8) times that to that.",
    ),
    click.option(
        "--concurrency",
        metavar="N,N...",
        default="4,8,16,32,64",
        show_default=True,
        help="Requests in flight.",
    ),
    click.option(
        "--times",
        multiple=True,
        metavar="PATH",
        help="Times of kernels: a set of AIConfigurator's tables (SYSTEM/ENGINE/VERSION), or a run of "
        "this suite. What is missing is assumed from data sheets.",
    ),
    click.option(
        "--calibrate",
        multiple=True,
        metavar="FILE",
        help="Serving results of this server, of any client; two are enough.",
    ),
]
"""What `predict` and `what-if` are asked of."""


def of_system(command: Function) -> Function:
    for option in reversed(OF_SYSTEM):
        command = option(command)
    return command


@click.command("predict")
@of_system
@click.option("--warm", is_flag=True, help="The server has served before: its first requests find it warm.")
@json_option("Write JSON there instead of tables.")
def predict(json_to: str | None, **options: Any) -> None:
    """TPOT, TTFT and throughput of DeepSeek-R1 in FP8 from the times of its kernels, with 90 % intervals."""
    require_writable(json_to, None)
    loads = loads_of(options["lengths"], options["concurrency"])
    model = model_of(options)
    from harness.serving.link.predictions import outlook
    from harness.serving.link.report import as_json, prediction_text

    looks = [outlook(model, load) for load in loads]
    if json_to:
        write(json_to, as_json(model, looks))
    else:
        print(prediction_text(model, looks))


def model_of(options: dict[str, Any]) -> Link:
    """Raises UsageError."""
    from harness.serving.link.model import System, link

    match = PARALLEL.fullmatch(options["parallel"].strip().lower())
    if not match:
        raise UsageError(f"cannot read --parallel {options['parallel']!r}; write tp8, or tp8,ep8")
    return link(
        System(
            hardware=options["hardware"],
            engine=options["engine"],
            tp=int(match[1]),
            ep=int(match[2] or 1),
            kv=KV[options["kv_dtype"]],
            times=options["times"],
            calibrate=options["calibrate"],
            warm=options.get("warm", False),
        )
    )


def loads_of(lengths: str, concurrency: str) -> list[Load]:
    """Raises UsageError."""
    from harness.serving.link.load import Load

    match = LENGTHS.fullmatch(lengths.strip())
    try:
        counts = [int(word) for word in concurrency.split(",")]
    except ValueError:
        raise UsageError(f"cannot read --concurrency {concurrency!r}; write 16 or 4,8,16") from None
    if not match:
        raise UsageError(
            f"cannot read --lengths {lengths!r}; write 8192/1024, or 8192/1024/1 for equal lengths"
        )
    ratio = float(match[3] or 0.8)
    return [Load(int(match[1]), int(match[2]), count, range_ratio=ratio) for count in counts]
