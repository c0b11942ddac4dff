"""`python -m harness serving ab`: does a variable, a flag or an image change my server."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import Command, answer, interruptible, json_option, write_json
from harness.errors import FAILED, NOTHING_RAN, OK, HarnessError, UsageError
from harness.files import read_toml, require_writable, write
from harness.paths import RESULTS, command

if TYPE_CHECKING:
    from harness.files import JsonObject
    from harness.serving.ab.plan import Plan
    from harness.serving.ab.record import Record


def _percent(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d*\.?\d+ ?%?", text) or not 0 < (margin := float(text.rstrip("% "))) < 50:
        raise UsageError(
            f"cannot read --margin {text!r}; write per cent above 0 and below 50, as 0.5 or 0.5%"
        )
    return margin


@click.command("ab", cls=Command)
@click.argument("file", required=False, metavar="[FILE.toml]")
@click.option("--launch", metavar="CMD", help="Start the server so; {port} is filled in.")
@click.option("--client", metavar="CMD", help="Call it once so; {url}, {seed}, {result} are filled in.")
@click.option(
    "--arm", "arms", multiple=True, metavar="'NAME: A=1 --flag ...'", help="Compare this arm: its changes."
)
@click.option(
    "--template",
    is_flag=False,
    flag_value="",
    metavar="[NAME]",
    help="Print a plan for an engine and a GPU, or a published set-up; without NAME, list them.",
)
@click.option("--dry-run", is_flag=True, help="Print what would run and for how long; start nothing.")
@click.option("--pairs", type=click.IntRange(1), metavar="N",
              help="Measure N pairs and look once.  [default: look after 4, 6, 8 and 12]")  # fmt: skip
@click.option(
    "--margin",
    callback=_percent,
    metavar="PERCENT",
    help="Decide on differences of at least this.  [default: 1]",
)
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
        from harness.report.fitting_table import table_of
        from harness.serving.ab.templates import listed, template_text

        if template:
            write(json_to or "-", template_text(template))
        else:
            answer(json_to, listed(), lambda: table_of(listed()))
        return
    from harness.plan.budget import parse_seconds
    from harness.progress import Progress
    from harness.serving.ab.names import looked_up
    from harness.serving.ab.plan import require_programs
    from harness.serving.ab.record import Record, require_none
    from harness.serving.ab.result import finished, planned, predicted

    budget_s = parse_seconds(options["budget"], "--budget") if options["budget"] else None
    changes = {key: options[key] for key in ("pairs", "margin") if options[key] is not None}
    plan = _plan(changes, **options)
    if options["resume"] and (out or options["predict"]):
        raise UsageError("--resume goes on with its own folder and predictions: no --out, no --predict")
    record = Record(Path(options["resume"])) if options["resume"] else None
    if record:
        record.require_plan(plan or record.plan.model_copy(update=changes))
        plan = record.plan
    if plan is None:
        raise UsageError("name a plan: FILE.toml, --launch with --client and --arm, --template or --resume")
    out = out or f"{RESULTS}/local/serving-ab-{datetime.now():%Y%m%d-%H%M%S}"
    folder = record.folder if record else Path(out)
    if record is None:
        require_none(folder)
    names = record.names if record else looked_up(plan, Progress(quiet).note)
    predictions = record.predictions if record else predicted(plan, options["predict"])
    kept = [prediction.model_dump() for prediction in predictions]
    text = planned(plan, record, folder.absolute(), names, predictions, budget_s)
    if options["dry_run"]:
        if json_to:
            told = {"plan": plan.model_dump(), "budget_s": budget_s, "names": names, "predictions": kept,
                    "says": text}  # fmt: skip
            write_json(json_to, told)
        if json_to != "-":
            print(text)
        return
    if record is None or finished(record) in ("", "given up"):
        require_programs(plan)
    record = record or Record.begin(folder, plan, {"names": names, "predictions": kept})
    sys.exit(_run(record, budget_s, text, json_to, quiet))


def _plan(
    changes: JsonObject,
    file: str | None,
    launch: str | None,
    client: str | None,
    arms: tuple[str, ...],
    **_: object,
) -> Plan | None:
    """Of the file or the options; None where neither says anything."""
    from harness.serving.ab.plan import made

    if file and (launch or client or arms):
        raise UsageError("give FILE.toml, or --launch, --client and --arm, not both")
    if file:
        return made({**read_toml(Path(file)), **changes}, file)
    if not (launch or client or arms):
        return None
    parsed = [parse_arm(text) for text in arms]
    if not (launch and client and len(dict(parsed)) == len(parsed) > 1):
        raise UsageError("give --launch, --client and at least two --arm, each with a name of its own")
    return made({"launch": launch, "client": client, "arms": dict(parsed), **changes}, "--launch and --arm")


def parse_arm(text: str) -> tuple[str, JsonObject]:
    """`NAME: A=1 image=TAG --flag value`; `A=unset` takes a variable away. Raises UsageError."""
    name, _, rest = text.partition(":")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise UsageError(f"cannot read --arm {text!r}: {error}") from None
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    if wrong := [word for word in words[:first] if not re.match(r"[A-Za-z_]\w*=", word)]:
        raise UsageError(f"--arm {text!r}: {wrong[0]!r} is no A=1, no image=TAG and no --flag")
    env = dict(word.split("=", 1) for word in words[:first])
    return name.strip(), {"image": env.pop("image", ""), "env": env, "flags": shlex.join(words[first:])}


def _run(record: Record, budget_s: float | None, text: str, json_to: str | None, quiet: bool) -> int:
    from harness.progress import Progress
    from harness.report.terminal import show
    from harness.serving.ab.result import finished, shown, summary
    from harness.serving.ab.session import Session

    say = Progress(quiet).note
    if finished(record) in ("", "given up"):
        say(text)
        record.hold(say)
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            rest = command("serving", "ab", "--resume", record.folder)
            with interruptible(f"finished pairs are recorded; the rest:\n  {rest}"):
                Session(record, budget_s, say).run()
        except OSError as error:
            raise HarnessError(f"{error}; finished pairs are recorded, --resume goes on") from None
        finally:
            signal.signal(signal.SIGTERM, before)
    found = summary(record)
    if json_to:
        write_json(json_to, found, allow_nan=False)
    if not quiet and json_to != "-":
        show(shown(found), sys.stdout)
    if not found["pairs"]:
        return NOTHING_RAN
    return FAILED if found["finished"] == "given up" else OK
