"""A user's mistakes and a machine's limits: one clear line and an exit code, never a traceback."""

OK, FAILED, USAGE, NOTHING_RAN = 0, 1, 2, 3
STOPPED = 130  # by control-C, as shells have it


class HarnessError(Exception):
    """Ends the command with its text on one line of stderr."""

    exit_code = FAILED


class UsageError(HarnessError):
    """The command cannot be understood, or an input cannot be read."""

    exit_code = USAGE


class NothingRan(HarnessError):
    """Nothing could run here."""

    exit_code = NOTHING_RAN


def one_line(error: BaseException) -> str:
    """An exception as one line, its type first."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
