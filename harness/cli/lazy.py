"""A command group that imports the module of a command when that command is called."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """The group's own `--help` imports the modules of all commands, so each command imports what it needs in
    its body.

    modules: `module:attribute` by the name of a command
    """

    def __init__(
        self, *args: Any, modules: Mapping[str, str], **kwargs: Any
    ) -> None:  # the parameters of click.Group
        super().__init__(*args, **kwargs)
        self.modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.modules})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.modules[cmd_name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises click.UsageError, which lists the commands, if the first argument is none of them."""
        if args[0][:1] != "-" and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}; there are: {', '.join(self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)
