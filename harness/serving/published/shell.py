"""Shell commands and dstack tasks, as far as a documented recipe needs them read."""

from __future__ import annotations

import shlex


def flags_of(command: str) -> tuple[str, ...]:
    """The options of the last command of a script, each with its value: `--tp 8`."""
    flags: list[str] = []
    lines = command.replace("\\\n", " ").strip().splitlines() or [""]
    for word in shlex.split(lines[-1], comments=True):
        if word.startswith("--"):
            flags.append(word)
        elif flags and word != "&" and " " not in flags[-1]:
            flags[-1] += f" {word}"
    return tuple(flags)


def commands_of(task: str) -> str:
    """The commands of a dstack task, as a shell script: what YAML folds is joined."""
    commands: list[str] = []
    _, _, after = task.partition("\ncommands:\n")
    for line in after.splitlines():
        if not line.startswith(" "):
            break
        if line.lstrip().startswith("- "):
            commands.append(line.lstrip()[2:].strip())
        else:
            commands[-1] += f" \\\n    {line.strip()}"
    return "\n".join(commands)
