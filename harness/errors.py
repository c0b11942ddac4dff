"""Errors and exit codes. A user's mistake or a machine's limit ends a command with one line."""

from __future__ import annotations

OK, FAILED, USAGE, NOTHING_RAN = 0, 1, 2, 3  # exit codes
STOPPED = 130  # the exit code after control-C, as in shells


class HarnessError(Exception):
    """Ends the command with its text on one line of stderr."""

    exit_code = FAILED


class UsageError(HarnessError):
    """The command cannot be understood, or an input cannot be read."""

    exit_code = USAGE


class UnreadableError(UsageError):
    """A file that cannot be read. The message names it, and the line at which it becomes unreadable."""


class NothingRan(HarnessError):
    exit_code = NOTHING_RAN


def text_of(error: BaseException) -> str:
    """An exception's text in one line; empty where the exception's own code fails to give it. It is not taken
    from kernels.plugin_process, which has the same, because workers may run kernels/ of an older commit."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def one_line(error: BaseException) -> str:
    """An exception as one line that begins with its type."""
    text = text_of(error)
    if text.startswith("0 active drivers"):  # Triton's words for a machine without a GPU
        base = "kernels.triton_runtime.TritonImplementation"
        text = f"Triton has no GPU; it interprets a kernel on a CPU if the implementation derives from {base}"
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def mistake(error: Exception) -> str:
    """One line about an invalid input. Of an error of pydantic it has the place and text of one mistake, if
    possible a misspelt key, and the number of others: `load.pairs: Input should be ... (and 1 more)`.
    Of any other error it is `one_line`."""
    from pydantic import ValidationError

    from shapes.names import near

    if not isinstance(error, ValidationError):
        return one_line(error)
    errors = error.errors()
    others = len(errors) - 1
    unknown_keys = [each for each in errors if each["type"] == "extra_forbidden"]
    first = unknown_keys[0] if unknown_keys else errors[0]
    what = " ".join(first["msg"].removeprefix("Value error, ").split())
    if first["type"] == "missing":
        what = "is missing"
    if unknown_keys:
        what = "no such key"
        *parents, key = first["loc"]
        missing = [each["loc"] for each in errors if each["type"] == "missing"]
        missing_beside = [str(name) for *its_parents, name in missing if its_parents == parents]
        if meant := near(str(key), missing_beside):
            what += f"; did you mean {meant[0]}?"
            others -= 1  # the key that was meant is not missing
    more = f" (and {others} more)" if others else ""
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {what}{more}" if where else f"{what}{more}"
