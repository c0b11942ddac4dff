"""The command line. Each command has a module that is imported when it is called; nothing heavy is imported
here, so that `--help` and `list` start at once."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from harness.errors import STOPPED, USAGE, HarnessError, UsageError
from kernels import PluginError
from kernels.tuning import StoredError
from shapes.names import unknown

EXAMPLES = Path(__file__).parent / "examples.txt"
"""The examples in the help of commands, one in each line, which begins with the command."""


class LazyGroup(click.Group):
    """A group that imports the module of a command when the command is called. The group's own `--help`
    imports all `modules` (name -> `module:attribute`), so a command imports what it needs in its body."""

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        module, _, attribute = self.modules[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Group):
            # Examples begin with `serving load`, or with `run`: the top group, `cli`, is not in them.
            words = f"{self.name} {cmd_name} ".removeprefix("cli ")
            lines = EXAMPLES.read_text("utf-8").splitlines()
            own = [f"  python -m harness {line}" for line in lines if line.startswith(words)]
            command.epilog = "\n".join(["\b", "Examples:", *own])
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises UsageError, which lists the commands, if the first argument is none of them."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UsageError(unknown("command", args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


WITH_OWN_MODULE = ("campaign", "decide", "doctor", "engine", "explain", "serving", "shapes", "tune")
MODULES = {
    **{name: f"{__name__}.{name}:{name}" for name in WITH_OWN_MODULE},
    **{name: f"{__name__}.recorded:{name}" for name in ("claims", "compare", "export", "report", "show")},
    **{name: f"{__name__}.run:{name}" for name in ("check", "run", "toggle")},
    "compile": f"{__name__}.compile:compile_command",
    "list": f"{__name__}.list:list_command",
}
"""The `modules` of the top group."""


@click.group(
    cls=LazyGroup,
    modules=MODULES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
def cli() -> None:
    """Which implementation of DeepSeek's inference kernels is fastest here, and is it right?

    \b
    python -m harness run --op mla_decode                 rank them at small shapes
    python -m harness run --op mla_decode --suite r1-tp8  ... at DeepSeek-R1's
    python -m harness list impls                          what can run here
    python -m harness COMMAND --help                      options and examples

    Exit codes: 0 all that could run is right; 1 something was wrong, crashed, timed out or must not be
    shipped; 2 the command cannot be understood or an input not read; 3 nothing could run.
    """


def _mistake(error: click.ClickException) -> str:
    """One line on the mistake in the command line."""
    # Sizes of --case without quotes arrive as several words, which here stand on lines of their own.
    unquoted = re.search(r"--case\n(\w+=\S+(\n\w+=\S+)+)", "\n".join(sys.argv))
    if unquoted:
        return f'quote the sizes: --case "{" ".join(unquoted[1].split())}"'
    if isinstance(error, click.NoSuchOption) and error.ctx:
        if error.option_name == "--drafts" and error.ctx.info_name in ("run", "toggle", "tune"):
            return "no such option '--drafts' here: a suite says it, as r1-tp8-mtp3, or a size, as q=4"
        if error.option_name == "--target" and error.ctx.info_name == "tune":
            return "leave out --target: tune races on a device that is here; compile --target is for others"
        for option in error.ctx.command.params:
            for name in option.opts:
                if name.startswith("--") and error.option_name.startswith(name):
                    return f"no such option {error.option_name!r}; did you mean {name}?"
    return " ".join(error.format_message().split())  # Click lists choices over lines


def main() -> int:
    """Runs the command and returns the exit code. A user's mistake is one line on stderr."""
    code = USAGE
    try:
        cli(standalone_mode=False)
        return 0
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        return STOPPED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USAGE
    except click.ClickException as error:
        text = _mistake(error)
    except HarnessError as error:
        text, code = str(error), error.exit_code
    except (PluginError, StoredError) as error:
        text = str(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"cannot write: {error.strerror}"
    click.echo(f"error: {text}", err=True)
    return code
