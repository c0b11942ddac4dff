"""`python -m harness explain`: where a predicted gain went that serving does not show."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from harness.cli.options import Command, answer, json_option, parsed_by
from harness.errors import UsageError

MANY_VALUES = ("--before", "--after", "--trace", "--log")  # options that take all words up to the next option


class ExplainCommand(Command):
    """A command whose MANY_VALUES options take more than one value each."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts such an option before each of its values, as click reads it: `--log a --log b`."""
        words: list[str] = []
        option = ""
        for word in args:
            if word.startswith("-") and word != "-":
                option = word if word in MANY_VALUES else ""
            elif option and words[-1] != option:
                words.append(option)
            words.append(word)
        return super().parse_args(ctx, words)


def _rows(text: str | None) -> tuple[str, str] | None:
    """`BEFORE,AFTER` as two names. Raises ValueError."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise ValueError(f"--rows takes two names, BEFORE,AFTER, not {text!r}")
    return names[0], names[1]


@click.command("explain", cls=ExplainCommand)
@click.option("--ab", "record", metavar="DIR", help="Read this record of `serving ab`.")
@click.option("--arm", "name", default="", metavar="NAME",
              help="Take this one, where the record has several.")  # fmt: skip
@click.option("--before", multiple=True, metavar="FILE...",
              help="Read results of any client without the change.")  # fmt: skip
@click.option("--after", multiple=True, metavar="FILE...", help="Pair them with these, in order.")
@click.option("--change", "texts", multiple=True, metavar="OP=FACTORx",
              help="Expect this, as `what-if` takes it.")  # fmt: skip
@click.option("--run", "run", metavar="RUN", help="Expect what this run timed before and after.")
@click.option("--rows", callback=parsed_by(_rows), metavar="BEFORE,AFTER",
              help="Name two implementations or settings of it.  [default: baseline, fastest]")  # fmt: skip
@click.option("--trace", "traces", multiple=True, metavar="[BEFORE] AFTER",
              help="Read profiler's traces of decode steps without and with it, of one rank.")  # fmt: skip
@click.option("--log", "logs", multiple=True, metavar="FILE...",
              help="Read logs of the server with the change.")  # fmt: skip
@json_option("Write the account there as JSON.")
def explain(
    record: str | None, name: str, before: Sequence[str], after: Sequence[str], texts: Sequence[str],
    run: str | None, rows: tuple[str, str] | None, traces: Sequence[str], logs: Sequence[str],
    json_to: str | None,
) -> None:  # fmt: skip
    """Show where a predicted gain of serving went. The difference of what was expected and what a server did
    is split into causes, each with its size, its evidence and how sure it is; for the others it says what to
    record. Give what there is: a record of `serving ab` or results, the change, traces, logs.

    Exit codes: 0 explained, or nothing vanished; 1 more than half of the difference is not explained, or the
    observation is too noisy; 2 usage; 3 nothing to compare.
    """
    from harness.cli.serving.predict import parse_change
    from harness.explain.account import account, facts
    from harness.explain.alone import timed_alone
    from harness.explain.inputs import modelled, steps_in
    from harness.explain.served import read_logs
    from harness.explain.sides import read_sides
    from harness.explain.text import shown
    from harness.files import require_writable

    require_writable(json_to, None)
    if record and (before or after):
        raise UsageError("give --ab, or --before and --after, not both")
    if bool(before) != bool(after):
        raise UsageError("--before and --after go together: results are paired in order")
    if len(traces) > 2 or len(set(traces)) < len(traces):
        raise UsageError(
            "--trace takes one trace of each server, BEFORE AFTER, or that with the change alone"
        )
    if (name and not record) or (rows and not run):
        raise UsageError("--arm is of --ab, and --rows is of --run")
    changes = [parse_change(text) for text in texts]
    alone = timed_alone(run, rows) if run else None
    if any(change.phase == "prefill" for change in changes):
        raise UsageError("explain is of decode steps: a change of prefill alone saves nothing there")
    if alone and changes and {change.op for change in changes} != {alone.op}:
        raise UsageError(f"{run} timed {alone.op}, which is not the op of --change {texts[0]}")
    sides = read_sides(record, name, before, after)
    # What the logs of the server with the change say beyond those of the server without it.
    log = read_logs([*logs, *sides.logs]).of_change(read_logs(sides.base_logs), sides.names)
    steps = steps_in(traces, changes, alone, sides, log)
    if steps:
        ops = steps.ops
    elif changes:
        ops = tuple(change.op for change in changes)
    else:
        ops = (alone.op,) if alone else ()
    # The model of serving predicts the gain where neither the record nor a trace says what to expect.
    predictions = () if sides.predictions or steps else modelled(record, before, changes, alone)
    explained = account(ops, sides, steps, log, predictions)
    answer(json_to, facts(explained), lambda: shown(explained))
    sys.exit(explained.code)
