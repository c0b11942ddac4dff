"""Errors and exit codes. A user's mistake or a machine's limit ends a command with one line."""

from __future__ import annotations

OK, FAILED, USAGE, NOTHING_RAN = 0, 1, 2, 3
STOPPED = 130  # after control-C, as in shells


class HarnessError(Exception):
    """Ends the command with its text on one line of stderr."""

    exit_code = FAILED


class UsageError(HarnessError):
    """The command cannot be understood, or an input cannot be read."""

    exit_code = USAGE


class UnreadableError(UsageError):
    """A file that cannot be read. The message names it, and the line at which it becomes unreadable."""


class NothingRan(HarnessError):
    """Nothing could run here."""

    exit_code = NOTHING_RAN


def text_of(error: BaseException) -> str:
    """An exception's text in one line; empty where its own code cannot give it. kernels.plugin_process has
    the same for itself: workers use this one beside kernels of older commits."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def one_line(error: BaseException) -> str:
    """An exception as one line that begins with its type."""
    text = text_of(error)
    if text.startswith("0 active drivers"):  # Triton's words for a machine without a GPU
        text = (
            "Triton has no GPU; TritonImplementation of kernels.triton_runtime as base interprets it on a CPU"
        )
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def mistake(error: Exception) -> str:
    """One line about an invalid input. For an error of pydantic: the place and text of a mistake, a misspelt
    key before others, and how many more there are (`load.pairs: Input should be ...`). For any other error:
    `one_line`."""
    from pydantic import ValidationError

    from shapes.names import near

    if not isinstance(error, ValidationError):
        return one_line(error)
    errors = error.errors()
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    where = ".".join(map(str, first["loc"]))
    plain = {"extra_forbidden": "no such key", "missing": "is missing"}
    what = plain.get(first["type"]) or " ".join(first["msg"].removeprefix("Value error, ").split())
    if first["type"] == "extra_forbidden":
        beside = [each["loc"] for each in errors if each["type"] == "missing"]
        lacking = [str(loc[-1]) for loc in beside if loc[:-1] == first["loc"][:-1]]
        for key in near(str(first["loc"][-1]), lacking)[:1]:
            what, errors = f"{what}; did you mean {key}?", errors[1:]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}: {what}{more}" if where else f"{what}{more}"
