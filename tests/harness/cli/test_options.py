"""Options as commands get them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import click

from harness.cli import cli
from harness.cli.options import measuring
from harness.run.request import Request


def commands(group: click.Group, *names: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)
        elif command is not None:
            yield " ".join([*names, name]), command


def test_a_command_is_found_in_the_file_of_its_name():
    for name, command in commands(cli):
        *groups, own = name.split()
        assert command.name == own
        assert command.callback.__module__ == ".".join(["harness.cli", *groups, own])


def test_a_request_has_every_option_that_measuring_commands_share():
    @click.command()
    @measuring
    def measure(request):
        pass

    shared = {option.name for option in measure.params}
    assert shared <= {field.name for field in fields(Request)}
    for name in ("run", "toggle", "compare"):
        assert shared <= {option.name for option in dict(commands(cli))[name].params}
