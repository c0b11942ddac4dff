"""`python -m harness decide`: how to launch an engine, by recorded runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from harness.cli.engine import deployment, parse_load, parse_settings
from harness.cli.options import Command, OneOf, answer, cases_file, json_option, parsed_by

if TYPE_CHECKING:
    from shapes.scheduler import Workload


def _loads(texts: tuple[str, ...]) -> list[Workload]:
    """The loads of --workload; an empty text has none. Raises ValueError."""
    return [load for load in map(parse_load, texts) if load]


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--engine", type=OneOf(["sglang", "vllm"]), required=True, metavar="sglang|vllm",
              help="Decide how to launch this engine.")  # fmt: skip
@click.option("--workload", "loads", multiple=True, callback=parsed_by(_loads),
              metavar="isl=N,osl=N,concurrency=N",
              help="Weigh cases by the calls of this load of the model; steps of several loads count alike.  "
              "[default: isl=3200,osl=800,concurrency=64 where runs are of a model's suite, else the runs' "
              "own weights]")  # fmt: skip
@cases_file
@deployment
@click.option("--with", "given", multiple=True, callback=parsed_by(parse_settings), metavar="NAME=VALUE",
              help="This variable or flag is set already and stays.")  # fmt: skip
@click.option("--margin", type=click.FloatRange(0, 100), default=1.0, show_default=True, metavar="PERCENT",
              help="Leave the default where a launch saves less of the ops' time in a step.")  # fmt: skip
@click.option("--page", metavar="FILE", help="Write a page for the browser there; - is stdout.")
@json_option("Write the decision as JSON there; - is stdout.")
@click.pass_context
def decide(
    ctx: click.Context, runs: tuple[str, ...], engine: str, loads: list[Workload], given: dict[str, str],
    margin: float, page: str | None, json_to: str | None, **deployed: Any,  # of --cases and `deployment`
) -> None:  # fmt: skip
    """Decide how to launch an engine, from recorded RUNS. They are those of `run` and `toggle` on one
    machine. Each choice that the engine offers swaps rows in some of the model's calls; it is compared with
    the engine's default over those calls. What is clearly faster is taken; what is not told from the default
    is left. The answer says what it is worth, at which sizes another row is faster, and what was not
    measured. It ends with the lines that launch the server."""
    from harness.decide.measured import read_measured
    from harness.decide.text import decision_text, facts
    from harness.decide.worth import decision_and_worth
    from harness.errors import NothingRan, UsageError
    from harness.files import require_writable

    require_writable(json_to, None)
    require_writable(page, None)
    if math.isnan(margin):
        raise UsageError("--margin takes per cent, not nan")
    if deployed["cases"] and loads:
        raise UsageError("--cases has the calls of a load itself: leave --workload")
    # Where the user leaves an option of the deployment out, the runs say it.
    default = ParameterSource.DEFAULT
    by_user = {name: value for name, value in deployed.items() if ctx.get_parameter_source(name) != default}
    decision, worth = decision_and_worth(engine, read_measured(runs), by_user, given, margin / 100, loads)
    if page:
        from harness.page.decision import decision_page
        from harness.page.html import write_page

        write_page(decision_page(decision, worth), page, ", ".join(runs))
        if page != "-":
            click.echo(f"written: {page}", err=True)
    if page != "-" or json_to:
        answer(json_to, facts(decision, worth), lambda: decision_text(decision, worth))
    if not decision.compared:
        raise NothingRan("nothing was compared: no choice has a time beside the default's")
