"""`python -m harness serving recipe [NAME]`: a published configuration as a shell script."""

from __future__ import annotations

import click

from harness.cli.options import json_option


@click.command("recipe")
@click.argument("name", required=False)
@click.option(
    "--part",
    type=click.Choice(["docker", "task", "manifests", "server", "client"]),
    help="Only that part of the recipe.",
)
@json_option("Write JSON there instead.")
def recipe(name: str | None, part: str | None, json_to: str | None) -> None:
    """A published configuration as a shell script: docker, server and client commands, dstack tasks and
    Kubernetes manifests, as far as its document gives them. What was mended is marked. Without NAME: the
    list."""
    from harness.files import write
    from harness.serving.published.documents import configurations
    from harness.serving.published.recipe import find, script
    from harness.serving.published.report import as_json, list_as_json, list_as_text

    if name is None:
        listed = list(configurations().values())
        if json_to:
            write(json_to, list_as_json(listed))
        else:
            print(list_as_text(listed))
        return
    configuration = find(name)
    if json_to:
        write(json_to, as_json(configuration, part))
    else:
        print(script(configuration, part or ""), end="")
