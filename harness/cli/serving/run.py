"""`python -m harness serving run`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import json_option
from harness.cli.serving.progress import progress_to_stderr
from harness.errors import FAILED, NOTHING_RAN, OK
from harness.files import write

if TYPE_CHECKING:
    from harness.serving.live.run import RunRequest


def run(request: RunRequest, json_to: str | None, quiet: bool) -> int:
    """Makes the runs and prints what they show. 1 where a pair was given up, 3 where none finished."""
    from harness.serving.live.ab.summary import summarise, table
    from harness.serving.live.run import run_pairs

    journal = run_pairs(request, progress_to_stderr(quiet))
    summary = summarise(journal.lines(), journal.folder)
    if json_to:
        write(json_to, json.dumps(summary, indent=1) + "\n")
    if not quiet and json_to != "-":
        print(table(summary))
    if not summary["pairs"]:
        return NOTHING_RAN if summary["asked"] else OK
    return FAILED if summary["given_up"] else OK


@click.command("run")
@click.option(
    "--model",
    default="default",
    show_default=True,
    metavar="DIR|default",
    help="A model's directory; `default` makes a small DeepSeek-V3 here.",
)
@click.option(
    "--engine",
    default="vllm",
    show_default=True,
    metavar="vllm|sglang|tensorrt-llm|COMMAND",
    help="What serves it; a command has {model}, {port} and {name} filled in.",
)
@click.option(
    "--client",
    default="",
    metavar="vllm|sglang|COMMAND",
    help="What loads it, by default the engine's own; a command has {url} and {result} in it.",
)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME[:ITEM ...]",
    help="An arm, with A=1, --flag=value or a swap such as mla_decode=torch.naive; the first is the base.",
)
@click.option("--flag", "flags", multiple=True, metavar="FLAG", help="A flag of the engine for all arms.")
@click.option("--isl", default=512, show_default=True, type=click.IntRange(1), help="Input tokens.")
@click.option("--osl", default=96, show_default=True, type=click.IntRange(2), help="Output tokens.")
@click.option("--concurrency", default=4, show_default=True, type=click.IntRange(1))
@click.option("--prompts", default=4, show_default=True, type=click.IntRange(1), help="Requests in a run.")
@click.option("--pairs", default=4, show_default=True, type=click.IntRange(0), help="Runs of each arm.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of the first pair.")
@click.option(
    "--slice",
    "slice_s",
    default=0.0,
    metavar="SECONDS",
    type=click.FloatRange(0, 10),
    help="Both runs of a pair at once, their engines (on CPUs) in turn for so long.",
)
@click.option(
    "--renew",
    default=0,
    metavar="PAIRS",
    type=click.IntRange(0),
    help="Start servers anew after so many (default: never).",
)
@click.option("--out", required=True, metavar="DIR", help="Journal, results, logs.")
@click.option("--resume", is_flag=True, help="Go on with the runs in --out.")
@click.option("--trace", is_flag=True, help="Take a kernel trace of each arm first (vLLM).")
@click.option("--routing-log", is_flag=True, help="Log which experts tokens go to, of each arm first (vLLM).")
@click.option(
    "--prefill-pattern",
    default="",
    metavar="N+N|any",
    help="How requests must be prefilled together; by default as in a first run that does not count.",
)
@click.option("--keep-disturbed", is_flag=True, help="Count runs that other processes disturbed.")
@click.option("--one-at-a-time", is_flag=True, help="Never keep two servers up.")
@click.option("--port", type=click.IntRange(1, 65535), help="Of the server; by default a free one.")
@click.option("--start-timeout", default=600.0, show_default=True, metavar="S")
@click.option("--run-timeout", default=600.0, show_default=True, metavar="S")
@json_option("Write the summary there.")
@click.option("--quiet", is_flag=True)
def run_command(json_to: str | None, quiet: bool, **options: Any) -> None:
    """Serve a model here and load it, arm by arm: real engine, real client, on loopback.

    Arms take turns in mirrored pairs with the same prompts. Runs that a rule rejects are made again and
    counted. The journal in --out has every finished run; --resume goes on from there.
    """
    from harness.serving.live.client.load import ClientLoad
    from harness.serving.live.run import RunRequest

    keys = {"input_len": "isl", "output_len": "osl", "concurrency": "concurrency", "prompts": "prompts"}
    load = ClientLoad(**{field: options.pop(key) for field, key in keys.items()})
    sys.exit(run(RunRequest(load=load, **options), json_to, quiet))
