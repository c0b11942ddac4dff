"""`python -m harness decide`: how to launch an engine, by recorded runs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from harness.cli.engine import deployment, given_settings, served_load
from harness.cli.options import Command, OneOf, answer, cases_file, json_option, parsed_by

USUAL_LOAD = "isl=3200,osl=800,concurrency=64"
"""The load of AMD's and dstack's runs, of which the suites have the shapes."""
PLACE = re.compile(r"(\S+) ((?:(?:tp|dp|ep)\d+ )+)")

if TYPE_CHECKING:
    from harness.decide.measured import Measured
    from harness.engine import EngineRequest


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--engine", type=OneOf(["sglang", "vllm"]), required=True, metavar="sglang|vllm",
              help="Decide how to launch this engine.")  # fmt: skip
@click.option("--workload", callback=parsed_by(served_load), metavar="isl=N,osl=N,concurrency=N",
              help="Weigh cases by the calls of this load of the model.  [default: isl=3200,osl=800,"
              "concurrency=64 where runs are of a model's suite, else the runs' own weights]")  # fmt: skip
@cases_file
@deployment
@click.option("--with", "given", multiple=True, callback=parsed_by(given_settings), metavar="NAME=VALUE",
              help="This variable or flag is set already and stays.")  # fmt: skip
@click.option("--margin", type=click.FloatRange(0, 100), default=1.0, show_default=True, metavar="PERCENT",
              help="Leave what saves less than this of the kernels' time.")  # fmt: skip
@click.option("--page", metavar="FILE", help="Write a page for the browser there; - is stdout.")
@json_option("Write the decision as JSON there; - is stdout.")
@click.pass_context
def decide(
    ctx: click.Context,
    runs: tuple[str, ...],
    margin: float,
    page: str | None,
    json_to: str | None,
    **served: Any,  # click passes untyped values
) -> None:
    """Decide which flags and variables to launch an engine with, from recorded RUNS of `run` and `toggle` on
    one machine. Each choice that the engine offers swaps rows in some of the model's calls; it is compared
    with the engine's default over those calls. What is clearly faster is taken; what is not told from the
    default is left. The answer says what it is worth, at which sizes another row is faster, and what was not
    measured. It ends with the lines that launch the server."""
    from harness.decide.choices import Launches
    from harness.decide.decision import decide as decided
    from harness.decide.measured import read_measured
    from harness.decide.mix import mix_of
    from harness.decide.text import decision_text, facts
    from harness.decide.worth import worth_of
    from harness.errors import NothingRan
    from harness.files import require_writable

    require_writable(json_to, None)
    if page:
        require_writable(page, None)
    measured = read_measured(runs)
    request = _request(ctx, measured, served)
    launches = Launches(served["engine"], measured, mix_of(measured, request), served["given"])
    decision = decided(launches, margin / 100)
    worth = worth_of(decision, request)
    if page:
        from harness.page.decision import decision_page
        from harness.page.html import write_page

        write_page(decision_page(decision, worth), page, ", ".join(runs))
        if page != "-":
            click.echo(f"written: {page}", err=True)
    if page != "-":
        answer(json_to, facts(decision, worth), lambda: decision_text(decision, worth))
    if not any(each.is_complete for each in decision.choices):
        raise NothingRan("nothing was compared: no choice has a time beside the default's")


def _request(ctx: click.Context, measured: Measured, served: dict[str, Any]) -> EngineRequest | None:
    """The deployment by whose calls cases are weighed: as the user says it, else as the places of the runs'
    cases name it. None where neither names one, or where steps verify drafts, of which a workload does not
    tell how many are accepted. Raises UsageError."""
    from harness.catalogue.architectures import named_sheet
    from harness.engine import EngineRequest
    from harness.errors import UsageError
    from harness.serving.names import hardware_name

    if served["cases"] and served["workload"]:
        raise UsageError("--cases has the calls of a load itself: leave --workload")
    named = {name for name in ("workload", "cases", "model", "tp", "ep", "dp_attention", "kv")
             if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}  # fmt: skip
    inferred = {} if named & {"model", "tp", "ep", "dp_attention"} else _deployment(measured)
    drafts = served["drafts"] or 0
    if not (named or inferred) or (drafts and not served["cases"]):
        return None
    arch = hardware_name(measured.device) if named_sheet(hardware_name(measured.device)) else measured.arch
    asked = EngineRequest(arch=arch, **{**served, **inferred, "drafts": drafts})
    workload = asked.workload or served_load(USUAL_LOAD)
    return replace(asked, workload=None if asked.cases else workload)


def _deployment(measured: Measured) -> dict[str, Any]:
    """The model and its split that the places of all cases name (`deepseek-r1 tp8 decode`); empty where they
    name none, or more than one, or the cases verify drafts."""
    from shapes.models import named_model

    cases = [sheet.case for sheets in measured.sheets.values() for sheet in sheets]
    found = {match[0]: match for case in cases if (match := PLACE.match(case.place))}
    if len(found) != 1 or any(
        not PLACE.match(case.place) or int(case.sizes.get("q", 1)) > 1 for case in cases
    ):
        return {}
    ((_, match),) = found.items()
    try:
        model = named_model(match[1])
    except ValueError:
        return {}
    degrees = {word[:2]: int(word[2:]) for word in match[2].split()}
    dp = degrees.get("dp", 1)
    kv = {str(case.sizes["kv"]) for case in cases if "kv" in case.sizes}
    return {
        "model": model, "tp": degrees.get("tp", 1) * dp, "ep": degrees.get("ep", 1), "dp_attention": dp > 1,
        **({"kv": kv.pop()} if len(kv) == 1 else {}),
    }  # fmt: skip
