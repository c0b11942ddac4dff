"""Guard of one command: runs it and leaves nothing of it behind. A program of its own, standard library only:

    python guard.py ORDERS_FD WORD_FD COMMAND...

Engines start processes that start processes. This one is their ancestor and, where Linux allows it, adopts
the orphans among them, so that it finds them all, also those that made a session of their own. It takes
orders from one pipe and says what happens on another, a line each:

    orders: pause, resume, stop SECONDS
    words:  started PID, failed REASON, paused SECONDS, resumed SECONDS (time.monotonic), ended CODE

When the pipe of orders closes, whoever gave them is gone, kill -9 included: all is ended at once. When the
command has ended, this stays until the pipe closes: what the command used can still be read from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORPHANED_GRACE_S = 1.0
TICK_S = 0.02
IDLE_S = 60.0
MOST_S = 30.0


def main() -> None:
    orders, words, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever gives the orders decides
    libc = _libc()
    if libc is not None:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for descriptor in (orders, words):
        os.set_inheritable(descriptor, False)
    child = _start(command, words, libc)
    if child is None:
        return
    _leave_stdin()
    _say(words, f"started {child}")
    code = _serve(orders, words, child)
    _end_all(child, 0.0)  # what the command left behind when it ended by itself
    _say(words, f"ended {code}")
    while os.read(orders, 4096):
        pass


def _libc() -> ctypes.CDLL | None:
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl  # noqa: B018 (Linux alone has it)
        return libc
    return None


def _start(command: list[str], words: int, libc: ctypes.CDLL | None) -> int | None:
    """The command's process, once it runs; None, with the reason said, where it cannot be run."""
    guard = os.getpid()
    read, write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child:
        os.close(write)
        reason = os.read(read, 4096)  # empty when the command has taken the child's place
        os.close(read)
        if reason:
            os.waitpid(child, 0)
            _say(words, f"failed {command[0]}: {reason.decode()}")
        return None if reason else child
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:
                os._exit(127)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(write, str(error.strerror).encode())
    finally:
        os._exit(127)


def _leave_stdin() -> None:
    """To the command alone: who writes to it is to see when it has ended."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _serve(orders: int, words: int, child: int) -> int:
    """Until the command ends; its exit code, negative for a signal. Sleeps in between: beside a measurement
    nothing else may take time."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    text = b""
    while True:
        code = _reap(child)
        if code is not None:
            return code
        ready, _, _ = select.select([orders, woken], [], [], IDLE_S)
        if woken in ready:
            os.read(woken, 4096)
        if orders not in ready:
            continue
        data = os.read(orders, 4096)
        if not data:
            return _end_all(child, ORPHANED_GRACE_S)
        text += data
        while b"\n" in text:
            line, text = text.split(b"\n", 1)
            word, _, rest = line.decode().partition(" ")
            if word == "stop":
                return _end_all(child, float(rest))
            if word in ("pause", "resume"):
                at = _signal_all(signal.SIGSTOP if word == "pause" else signal.SIGCONT)
                _say(words, f"{word}d {at!r}")


def _reap(child: int) -> int | None:
    """Takes leave of all that ended, adopted orphans too; the command's exit code once it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if not ended:
                break
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
    return code


def _end_all(child: int, grace: float) -> int:
    """Politely, then not; the command's exit code, or 0 where it had been taken already."""
    codes: list[int | None] = []
    if grace > 0:
        _signal_all(signal.SIGTERM)
        _signal_all(signal.SIGCONT)
    until = time.monotonic() + grace
    while time.monotonic() < until and _descendants():
        time.sleep(TICK_S)
        codes.append(_reap(child))
    # Those that are being started while others are killed are found in the next round.
    until = time.monotonic() + MOST_S
    while _descendants() and time.monotonic() < until:
        _signal_all(signal.SIGKILL)
        time.sleep(TICK_S)
        codes.append(_reap(child))
    codes.append(_reap(child))
    return next((code for code in codes if code is not None), 0)


def _signal_all(number: int) -> float:
    """When: to list the processes takes longer than to signal them."""
    pids, at = _descendants(), time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return at


def _descendants() -> list[int]:
    """All living ones, ancestors first."""
    parents = _parents()
    pids, queue = [], [os.getpid()]
    while queue:
        parent = queue.pop()
        children = [pid for pid, (above, alive) in parents.items() if above == parent and alive]
        dead = [pid for pid, (above, alive) in parents.items() if above == parent and not alive]
        pids += children
        queue += children + dead
    return pids


def _parents() -> dict[int, tuple[int, bool]]:
    """Process -> its parent, and whether it lives (a zombie does not)."""
    states = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            states[int(name)] = (int(parent), state not in (b"Z", b"X"))
    return states


def _say(words: int, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(words, f"{line}\n".encode())


if __name__ == "__main__":
    main()
