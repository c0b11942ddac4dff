"""`python -m harness serving ab`: does a variable, a flag or an image change my server."""

from __future__ import annotations

import itertools
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import Command, answer, interruptible, json_option, parsed_by, write_json
from harness.errors import FAILED, NOTHING_RAN, OK, HarnessError, UsageError
from harness.files import read_toml, require_writable, write
from harness.paths import RESULTS, command

if TYPE_CHECKING:
    from harness.files import JsonObject
    from harness.serving.ab.plan import Plan
    from harness.serving.ab.record import Record

UNFINISHED = ("", "given up")  # values of `harness.serving.ab.result.ending` for a record that can go on


def _percent(text: str | None) -> float | None:
    """`0.5%` -> 0.5. Raises ValueError."""
    if text is None:
        return None
    number = re.fullmatch(r"(\d*\.?\d+) ?%?", text)
    if number and 0 < float(number[1]) < 50:
        return float(number[1])
    raise ValueError(f"cannot read --margin {text!r}; write per cent above 0 and below 50, as 0.5 or 0.5%")


@click.command("ab", cls=Command)
@click.argument("file", required=False, metavar="[FILE.toml]")
@click.option("--launch", metavar="CMD", help="Start the server so; {port} is filled in.")
@click.option("--client", metavar="CMD", help="Call it once so; {url}, {seed}, {result} are filled in.")
@click.option("--arm", "arms", multiple=True, metavar="'NAME: A=1 --flag ...'",
              help="Compare this arm: its changes.")  # fmt: skip
@click.option("--template", is_flag=False, flag_value="", metavar="[NAME]",
              help="Print a plan for an engine and a GPU, or a published set-up; without NAME, list "
              "them.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print what would run and for how long; start nothing.")
@click.option("--pairs", type=click.IntRange(1), metavar="N",
              help="Measure N pairs and look once.  [default: look after 4, 6, 8 and 12]")  # fmt: skip
@click.option("--margin", callback=parsed_by(_percent), metavar="PERCENT",
              help="Decide on differences of at least this.  [default: 1]")  # fmt: skip
@click.option("--budget", metavar="3h", help="Begin no pair that would not end within it.")
@click.option("--predict", multiple=True, metavar="RUN|FILE", help="Record first what kernel times predict.")
@click.option("--out", metavar="DIR", help="Record there.  [default: a new folder in results/local/]")
@click.option("--resume", metavar="DIR", help="Go on with this record.")
@json_option("Write the result there as JSON.")
@click.option("--quiet", is_flag=True, help="Print neither table nor progress.")
def ab(template: str | None, out: str | None, json_to: str | None, quiet: bool, **options: Any) -> None:
    """Measure what a variable, a flag or an image does to a server.

    It starts each arm's server again and again, in mirrored pairs, calls it with your client, and gives the
    effect on TPOT, TTFT and throughput with its interval (docs/serving-ab.md). FILE.toml, or --launch,
    --client and --arm, say how.

    Exit codes: 0 finished, or what there was time for; 1 a pair was given up; 2 usage; 3 nothing finished.
    """
    require_writable(json_to, None)
    if template is not None:
        _print_template(template, json_to)
        return
    from harness.cli.serving.ab_display import planned
    from harness.plan.budget import parse_seconds
    from harness.progress import Progress
    from harness.serving.ab.expected import predicted
    from harness.serving.ab.names import looked_up
    from harness.serving.ab.plan import require_programs
    from harness.serving.ab.record import Record, require_none
    from harness.serving.ab.result import ending

    budget_s = parse_seconds(options["budget"], "--budget") if options["budget"] else None
    changes = {key: options[key] for key in ("pairs", "margin") if options[key] is not None}
    plan = _plan(changes, options)
    record = None
    if options["resume"]:
        if out or options["predict"]:
            raise UsageError("--resume goes on with its own folder and predictions: no --out, no --predict")
        record = Record(Path(options["resume"]))
        record.require_plan(plan or record.plan.model_copy(update=changes))  # refuses other changes, too
        plan, folder, names, predictions = record.plan, record.folder, record.names, record.predictions
    elif plan is None:
        raise UsageError("name a plan: FILE.toml, --launch with --client and --arm, --template or --resume")
    else:
        folder = Path(out or f"{RESULTS}/local/serving-ab-{datetime.now():%Y%m%d-%H%M%S}")
        require_none(folder)
        names = looked_up(plan, Progress(quiet).note)
        predictions = predicted(plan, options["predict"])
    facts = {"names": names, "predictions": [prediction.model_dump() for prediction in predictions]}
    text = planned(plan, record, folder.absolute(), names, predictions, budget_s)
    if options["dry_run"]:
        if json_to:
            write_json(json_to, {"plan": plan.model_dump(), "budget_s": budget_s, **facts, "says": text})
        if json_to != "-":
            print(text)
        return
    if record is None or ending(record) in UNFINISHED:
        require_programs(plan)
    sys.exit(_run(record or Record.begin(folder, plan, facts), text, budget_s, json_to, quiet))


def _print_template(name: str, json_to: str | None) -> None:
    """Prints the plan of this name; a list of the plans where the name is empty."""
    from harness.report.fitting_table import table_of
    from harness.serving.ab.templates import listed, template_text

    if name:
        write(json_to or "-", template_text(name))
    else:
        answer(json_to, listed(), lambda: table_of(listed()))


def _plan(changes: JsonObject, options: Mapping[str, Any]) -> Plan | None:
    """The plan of the file, or of the options; None where neither is given. changes: fields that replace its
    own"""
    from harness.serving.ab.plan import read_plan

    file, launch, client, arms = (options[name] for name in ("file", "launch", "client", "arms"))
    if file and (launch or client or arms):
        raise UsageError("give FILE.toml, or --launch, --client and --arm, not both")
    if file:
        return read_plan({**read_toml(Path(file)), **changes}, file)
    if not (launch or client or arms):
        return None
    by_name = dict(parse_arm(text) for text in arms)
    if not launch or not client or len(arms) < 2 or len(by_name) < len(arms):
        raise UsageError("give --launch, --client and at least two --arm, each with a name of its own")
    return read_plan({"launch": launch, "client": client, "arms": by_name, **changes}, "--launch and --arm")


def parse_arm(text: str) -> tuple[str, JsonObject]:
    """`NAME: A=1 B=unset image=TAG --flag value` -> the name and the entry of a plan. Raises UsageError."""
    name, _, changes = text.partition(":")
    try:
        words = shlex.split(changes)
    except ValueError as error:
        raise UsageError(f"cannot read --arm {text!r}: {error}") from None
    variables = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    flags = words[len(variables) :]
    for word in variables:
        if not re.match(r"[A-Za-z_]\w*=", word):
            raise UsageError(f"--arm {text!r}: {word!r} is no A=1, no image=TAG and no --flag")
    env = dict(word.split("=", 1) for word in variables)
    return name.strip(), {"image": env.pop("image", ""), "env": env, "flags": shlex.join(flags)}


def _run(record: Record, plan_text: str, budget_s: float | None, json_to: str | None, quiet: bool) -> int:
    """Measures what the record lacks, prints the result and returns the exit code. plan_text: of `planned`"""
    from harness.cli.serving.ab_display import shown
    from harness.progress import Progress
    from harness.report.terminal import show
    from harness.serving.ab.result import ending, summary
    from harness.serving.ab.session import Session

    log = Progress(quiet).note
    if ending(record) in UNFINISHED:
        log(plan_text)
        record.hold(log)
        handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a SIGTERM stops like Control-C
        try:
            to_resume = command("serving", "ab", "--resume", record.folder)
            with interruptible(f"finished pairs are recorded; the rest:\n  {to_resume}"):
                Session(record, budget_s, log).run()
        except OSError as error:
            raise HarnessError(f"{error}; finished pairs are recorded, --resume goes on") from None
        finally:
            signal.signal(signal.SIGTERM, handler)
    result = summary(record)
    if json_to:
        write_json(json_to, result, allow_nan=False)
    if not quiet and json_to != "-":
        show(shown(result), sys.stdout)
    if not result["pairs"]:
        return NOTHING_RAN
    return FAILED if result["finished"] == "given up" else OK
