"""`python -m harness serving validate`: the model against every stored series of public servers."""

from __future__ import annotations

import sys

import click

from harness.cli.options import json_option


@click.command("validate")
@click.option("--hardware", metavar="NAME", default="", help="Only servers of this machine.")
@click.option("--engine", metavar="NAME", default="", help="Only servers of this engine.")
@click.option(
    "--times", metavar="DIR", default="", help="AIConfigurator's tables in place of this project's times."
)
@json_option("Write JSON there, with every point, instead of a table.")
def validate(hardware: str, engine: str, times: str, json_to: str | None) -> None:
    """Errors of TPOT, mean TTFT and throughput, and how many points lie in their 90 % intervals, of servers
    that the model has not seen: uncalibrated, calibrated on two of their points, and on all of their
    shortest lengths. Of all servers together, exit code 1 where TPOT is more than 7 % off after that, or
    fewer than 85 % lie inside."""
    from harness.errors import FAILED, OK
    from harness.files import require_writable, write
    from harness.serving.link.report import validation_json, validation_text
    from harness.serving.link.validation import validated

    require_writable(json_to, None)
    validation = validated(hardware, engine, times)
    if json_to:
        write(json_to, validation_json(validation))
    else:
        print(validation_text(validation))
    sys.exit(OK if hardware or engine or times or validation.holds else FAILED)
