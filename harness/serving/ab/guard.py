"""Runs one command and leaves nothing of it behind. This program needs only the standard library:

    python guard.py ORDERS_FD CODE_FD GRACE STOP COMMAND...

Engines start processes that start processes. The guard is their ancestor. Where Linux allows it, it adopts
the orphans among them, so that it finds all of them, also those in a session of their own. It ends them when
the pipe ORDERS_FD closes: its parent closed it, or is gone, perhaps by kill -9.

    GRACE: seconds between SIGTERM to the command and SIGKILL to all that is left
    STOP:  a command, as a JSON list, that is run first (`docker stop ...`); [] for none
    CODE_FD: takes the command's exit code, negative for a signal, once nothing of it is left
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TICK_S = 0.05  # between two looks at processes that are to end
IDLE_S = 60.0  # the longest wait for a signal or an order while the command runs
MOST_S = 30.0  # the most for killing all processes, and for STOP beyond GRACE


def main() -> None:
    orders, code_to = int(sys.argv[1]), int(sys.argv[2])
    grace, stop, command = float(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5:]
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the pipe of orders ends the command
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guard = os.getpid()

    def prepare() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if hasattr(libc, "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:
                os._exit(127)

    try:  # the command inherits none of the descriptors
        process = subprocess.Popen(command, preexec_fn=prepare, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", flush=True)
        code: int | None = 127  # the exit code that shells use
    else:
        code = _wait(orders, process.pid)
        if code is None:
            code = _end(process.pid, grace, stop)
        _kill_all(process.pid)
    with contextlib.suppress(OSError):
        os.write(code_to, str(code).encode())


def _wait(orders: int, child: int) -> int | None:
    """The command's exit code (a signal's is negative); None once it is to be ended. Waiting takes no CPU
    time, which the server needs."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # a signal writes into it, and ends the sleep
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while (code := _reap(child)) is None:
        ready, _, _ = select.select([orders, woken], [], [], IDLE_S)
        if orders in ready:
            return None
        if woken in ready:
            os.read(woken, 4096)
    return code


def _end(child: int, grace: float, stop: list[str]) -> int:
    """Asks the command alone to end. An engine ends its own processes in their order; if its workers are
    signalled too, memory of a GPU may stay taken. It asks three times: vLLM 0.32 may lose a signal."""
    if stop:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(stop, stdin=subprocess.DEVNULL, timeout=grace + MOST_S, check=False)
    code: int | None = None
    for _ in range(3):
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        until = time.monotonic() + grace / 3
        are_left = True
        while are_left and time.monotonic() < until:
            # In this order: if the command ended between the two, this loop would end without its code.
            are_left = bool(descendants(os.getpid()))
            ended = _reap(child)
            code = code if ended is None else ended
            time.sleep(TICK_S if are_left else 0)
    return -signal.SIGKILL if code is None else code


def _kill_all(child: int) -> None:
    """Kills in rounds: a process that is started while others are killed is found in the next round."""
    until = time.monotonic() + MOST_S
    while (pids := descendants(os.getpid())) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(TICK_S)
        _reap(child)


def _reap(child: int) -> int | None:
    """Collects the processes that have ended. Returns the command's exit code if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if not ended:
                break
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
    return code


def descendants(root: int) -> list[int]:
    """The living descendants of a process, ancestors first."""
    parents: dict[int, int] = {}
    dead = set()
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            parents[int(name)] = int(parent)
            if state in (b"Z", b"X"):  # ended, and perhaps not collected
                dead.add(int(name))
    found, queue = [], [root]
    while queue:
        above = queue.pop()
        children = [pid for pid, parent in parents.items() if parent == above]
        found += children
        queue += children
    return [pid for pid in found if pid not in dead]


if __name__ == "__main__":
    main()
