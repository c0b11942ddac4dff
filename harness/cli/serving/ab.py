"""`python -m harness serving ab`: does a variable, a flag or an image change my server."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.interrupt import interruptible
from harness.cli.options import json_option
from harness.errors import FAILED, NOTHING_RAN, OK

if TYPE_CHECKING:
    from harness.files import JsonObject
    from harness.serving.ab.plan import Plan
    from harness.serving.ab.record import Record


@click.command("ab")
@click.argument("file", required=False, metavar="[FILE.toml]")
@click.option(
    "--launch", metavar="CMD", help="Starts the server; {port} is filled in, see docs/serving-ab.md."
)
@click.option("--client", metavar="CMD", help="Calls it once; {url}, {seed} and {result} are filled in.")
@click.option(
    "--arm", "arms", multiple=True, metavar="'NAME: A=1 --flag ...'", help="What it changes; twice or more."
)
@click.option(
    "--template",
    is_flag=False,
    flag_value="",
    metavar="[NAME]",
    help="Print a plan for an engine and a GPU, or list them.",
)
@click.option("--dry-run", is_flag=True, help="Print what would run, for how long; start nothing.")
@click.option("--pairs", type=click.IntRange(1), help="So many, looked at once (default: 4 to 12).")
@click.option("--margin", type=float, metavar="PERCENT", help="What is worth deciding (default: 1).")
@click.option("--budget", metavar="3h", help="Begin no pair that would not end within it.")
@click.option(
    "--predict", multiple=True, metavar="RUN|FILE", help="Write down first what kernels' times say."
)
@click.option("--out", metavar="DIR", help="The record's folder (default: a new one under results/local/).")
@click.option("--resume", metavar="DIR", help="Go on with this record.")
@json_option("Write the result there.")
@click.option("--quiet", is_flag=True, help="No table and no progress.")
def ab(
    file: str | None,
    launch: str | None,
    client: str | None,
    arms: tuple[str, ...],
    template: str | None,
    dry_run: bool,
    pairs: int | None,
    margin: float | None,
    budget: str | None,
    predict: tuple[str, ...],
    out: str | None,
    resume: str | None,
    json_to: str | None,
    quiet: bool,
) -> None:
    """Does a variable, a flag or an image change this server, and by how much?

    Starts each arm's server again and again, in mirrored pairs, calls it with your client, and gives the
    effect on TPOT, TTFT and throughput with its interval. FILE.toml, or --launch, --client and --arm, say how.

    Exit codes: 0 finished, or what there was time for; 1 a pair was given up; 2 usage; 3 nothing finished.
    """
    from harness.files import require_writable

    require_writable(json_to, None)
    if template is not None:
        from harness.serving.ab.templates import print_template

        print_template(template, json_to)
        return
    from harness.plan.budget import parse_seconds
    from harness.serving.ab.record import Record, default_folder

    budget_s = parse_seconds(budget, "--budget") if budget else None
    changes = {key: value for key, value in (("pairs", pairs), ("margin", margin)) if value is not None}
    plan = _plan(file, launch, client, arms, changes)
    if resume:
        record = Record(Path(resume))
        if plan:
            record.require_plan(plan)
        elif changes:
            record.require_plan(record.plan.model_copy(update=changes))
        plan = record.plan
    elif plan is None:
        raise click.UsageError(
            "name a plan: FILE.toml, --launch with --client and --arm, --template or --resume"
        )
    else:
        record = None
    folder = record.folder if record else Path(out) if out else default_folder()
    sys.exit(_run(plan, record, folder, dry_run, budget_s, predict, json_to, quiet))


def _plan(
    file: str | None, launch: str | None, client: str | None, arms: tuple[str, ...], changes: JsonObject
) -> Plan | None:
    """Of the file or the options; None where neither says anything."""
    from harness.errors import UsageError
    from harness.serving.ab.plan import made, parse_arm, read_plan

    if file and (launch or client or arms):
        raise UsageError("give FILE.toml, or --launch, --client and --arm, not both")
    if file:
        return made({**read_plan(file), **changes}, file)
    if not (launch or client or arms):
        return None
    if not (launch and client and len(arms) > 1):
        raise UsageError("give --launch, --client and at least two --arm")
    parsed = [parse_arm(text) for text in arms]
    if len({name for name, _ in parsed}) < len(parsed):
        raise UsageError("two arms have the same name")
    return made({"launch": launch, "client": client, "arms": dict(parsed), **changes}, "--launch and --arm")


def _run(
    plan: Plan, record: Record | None, folder: Path, dry_run: bool, budget_s: float | None,
    predict: tuple[str, ...], json_to: str | None, quiet: bool,
) -> int:  # fmt: skip
    import json

    from harness.files import write
    from harness.progress import Progress
    from harness.serving.ab.names import looked_up
    from harness.serving.ab.plan import require_programs
    from harness.serving.ab.record import Record
    from harness.serving.ab.report import planned, shown
    from harness.serving.ab.result import summary
    from harness.serving.ab.session import Session

    names = looked_up(plan) if record is None else record.about["names"]
    predictions = _predictions(plan, predict) if record is None else []
    text = planned(plan, record, folder.absolute(), names)
    if dry_run:
        if json_to:
            write(
                json_to,
                json.dumps({"plan": plan.model_dump(), "names": names, "says": text}, indent=1) + "\n",
            )
        if json_to != "-":
            print(text)
        return OK
    require_programs(plan)
    say = Progress(quiet).note
    say(text)
    if record is None:
        record = Record.begin(folder, plan, {"names": names, "predictions": predictions})
    record.hold(say)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with interruptible(f"finished pairs are recorded, --resume {folder} goes on"):
            Session(record, budget_s, say).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    found = summary(record)
    if json_to:
        write(json_to, json.dumps(found, indent=1, allow_nan=False) + "\n")
    if not quiet and json_to != "-":
        print(shown(found))
    if not found["pairs"]:
        return NOTHING_RAN
    return FAILED if found["finished"] == "given up" else OK


def _predictions(plan: Plan, names: tuple[str, ...]) -> list[JsonObject]:
    """The link is imported for these alone."""
    if not names:
        return []
    from harness.serving.ab.predict import predicted

    return predicted(plan, names)
