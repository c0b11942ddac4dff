"""The server of one launch. It runs under a guard (guard.py) and must own the process on its port."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError
from harness.files import read_toml
from harness.machine.device import steers
from harness.serving.ab.guard import descendants
from harness.serving.ab.plan import FOREIGN, Command
from harness.serving.compare.settings import flat

if TYPE_CHECKING:
    from typing_extensions import Self

GUARD = Path(__file__).with_name("guard.py")
ENDED_S = 100.0  # the most seconds that a guard needs beyond the time that its command gets
LAST_WORDS = 200  # characters of the log in a message
TAIL = 65536  # bytes of the log's end that are read
# Requests go straight to loopback, past any proxy of the environment.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_PATTERNS = read_toml(Path(__file__).with_name("engines.toml"))
FATAL = re.compile("|".join(_PATTERNS["fatal"]))
OF_ONE_LAUNCH = re.compile(rf"\b({'|'.join(_PATTERNS['of_one_launch'])})\b")
IN_USE = re.compile("address already in use|port is already allocated", re.IGNORECASE)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|AUTH", re.IGNORECASE)
LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp


class RunFailed(HarnessError):
    """A launch or a client's run that does not count; its text is one line with the reason."""


class PortTaken(RunFailed):
    """Another process has the port; the launch may work on another one."""


class Guarded:
    """A command whose whole tree of processes ends with this object, or with this process.

    log:   takes its stdout and stderr; the command runs in its folder
    keep:  a descriptor that stays open as long as any process of the command may be left
    grace: seconds between SIGTERM and SIGKILL
    stop:  a command that ends it, run before SIGTERM
    """

    def __init__(
        self, command: Command, log: Path, *, keep: int, grace: float = 5.0, stop: Command | None = None
    ) -> None:
        self.command, self.log = command, log
        # The most that ending the command may take: `grace` after SIGTERM, and as long before it for `stop`.
        self.most_s = (2 * grace if stop else grace) + ENDED_S
        self.code: int | None = None
        orders, self._orders = os.pipe()
        self._code, code_to = os.pipe()
        stop_words = json.dumps(stop.words if stop else [])
        guard = [sys.executable, "-I", "-S", str(GUARD), str(orders), str(code_to), f"{grace:g}", stop_words]
        try:
            with log.open("ab") as sink:
                self.guard = subprocess.Popen(
                    [*guard, *command.words], pass_fds=(orders, code_to, keep), env=command.environment(),
                    stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd=log.parent,
                    start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(orders)
            os.close(code_to)

    def wait(self, seconds: float = 0.0) -> int | None:
        """The command's exit code (negative: the signal), or None if it still runs after that time."""
        if self.code is None and select.select([self._code], [], [], seconds)[0]:
            code = os.read(self._code, 64)  # empty: the guard was killed, and with it what it guarded
            self.code = int(code) if code else self.guard.wait()
        return self.code

    def end(self) -> None:
        """Ends the command, and returns when none of its processes is left."""
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1
            self.wait(self.most_s)
            os.close(self._code)
            self.guard.wait(timeout=ENDED_S)

    def lines(self) -> list[str]:
        """The last lines of its log that are not empty."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            text = file.read().decode(errors="replace")
        return [line for line in map(str.strip, text.splitlines()) if line]

    def last_words(self) -> str:
        """The lines of its log that tell what went wrong, as one line, and the log's path."""
        lines = self.lines()
        telling = lines[-1:]
        for number, line in enumerate(lines):
            if "Error" in line or "error:" in line:
                telling = lines[number : number + 3]  # the line after an error's name often says more
        words = " ".join(telling)[:LAST_WORDS]
        return (f"it said: {words!r}" if words else "it said nothing") + f" (log: {self.log})"

    def how_it_ended(self) -> str:
        """`ended with exit code 1`, `died of Killed (9)`. Only for a command that has ended."""
        code = self.code or 0
        if code < 0:
            return f"died of {signal.strsignal(-code)} ({-code})"
        hint = "" if code else " (its command must stay in the foreground: end a script with `exec`)"
        return f"ended with exit code {code}{hint}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Server(Guarded):
    """The server of one launch, on its port."""

    def __init__(self, command: Command, port: int, log: Path, **options: Any) -> None:
        """options: see Guarded"""
        super().__init__(command, log, **options)
        self.port = port

    def wait_ready(self, path: str, timeout_s: float) -> float:
        """Waits until it answers on a path, and returns the seconds that this took. Raises RunFailed if it
        dies or is late, PortTaken if another process answers."""
        started, pause = time.monotonic(), 0.05
        while time.monotonic() - started < timeout_s:
            self.check("before it served")
            if self.get(path, 30.0) is not None:
                if self.owned() is False:
                    raise PortTaken(f"another process, not this server, answers on port {self.port}")
                return time.monotonic() - started
            self.wait(pause)
            pause = min(1.0, pause * 1.3)
        raise RunFailed(f"it did not serve within {timeout_s:g} s (ready_timeout); {self.last_words()}")

    def check(self, when: str) -> None:
        """Raises RunFailed if it has ended, or has reported that it cannot serve any more."""
        if self.wait() is not None:
            words = self.last_words()
            kind = PortTaken if IN_USE.search(words) else RunFailed
            raise kind(f"the server {self.how_it_ended()} {when}; {words}")
        if line := next(filter(FATAL.search, self.lines()), ""):
            raise RunFailed(f"the server failed {when}: {line[:LAST_WORDS]!r} (log: {self.log})")

    def get(self, path: str, timeout_s: float = 10.0, post: bool = False) -> str | None:
        """The body of an answer with status 200; None for any other answer."""
        url = f"http://127.0.0.1:{self.port}{path}"
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            request = urllib.request.Request(url, data=b"" if post else None)
            with _OPENER.open(request, timeout=timeout_s) as answer:
                return answer.read().decode(errors="replace") if answer.status == 200 else None
        return None

    def owned(self) -> bool | None:
        """Whether a process of this launch listens on the port; None: that cannot be told, because the
        server is in a container or no socket is seen."""
        if Path(self.command.words[0]).name in FOREIGN or not listening(self.port):
            return None
        return self._listener() is not None

    def _listener(self) -> int | None:
        """The process of this launch that listens on the port; None: none is seen."""
        sockets = listening(self.port)
        return next((pid for pid in descendants(self.guard.pid) if sockets & _opened_by(pid)), None)

    def identity(self) -> dict[str, Any]:
        """What it reports of itself, and the variables with which it was started."""
        info, models = self._json("/server_info"), self._json("/v1/models").get("data")
        first = models[0] if isinstance(models, list) and models else {}
        model = first if isinstance(first, dict) else {}
        settings = flat(info, lists=False)
        return {
            "engine": "sglang" if "internal_states" in info else str(model.get("owned_by") or ""),
            "version": str(info.get("version") or self._json("/version").get("version") or ""),
            "model": str(model.get("id", "")), "owned": self.owned(),
            "server_info": {key: settings[key] for key in settings if not OF_ONE_LAUNCH.search(key)},
            "environment": self._environment(),
        }  # fmt: skip

    def _json(self, path: str) -> dict[str, Any]:
        """The object that the server answers; empty if it answers anything else."""
        with contextlib.suppress(ValueError):
            value = json.loads(self.get(path) or "")
            return value if isinstance(value, dict) else {}
        return {}

    def _environment(self) -> dict[str, str]:
        """The variables of the server's process that steer kernels or are the plan's, without secrets."""
        processes = descendants(self.guard.pid)
        server = self._listener() or (processes[0] if processes else 0)  # else the command itself
        values: dict[str, str] = {}
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{server}/environ").read_text("utf-8", errors="replace")
            values = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
        names = [name for name in sorted(values) if steers(name) or name in self.command.variables]
        return {name: values[name] for name in names if not SECRET.search(name)}


@contextlib.contextmanager
def held_port(first: int) -> Iterator[int]:
    """The first free port from a port on, in steps of ten, because engines take the next ones for themselves.
    An engine may begin to listen minutes after its launch. Until then a name of an abstract socket holds the
    port against other A/Bs. Any other process that takes it meanwhile is found by its socket."""
    for port in range(first, 65000, 10):
        with socket.socket() as probe, socket.socket(socket.AF_UNIX) as held:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
                held.bind(f"\0serving-ab-port-{port}")
            except OSError:
                continue
            probe.close()  # the server takes the port itself
            yield port
            return
    raise RunFailed(f"no port from {first} on is free")


def listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on a port; empty if the system does not tell."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text("utf-8").splitlines()[1:]:
                _, address, _, state, *others = line.split()  # of man proc_net_tcp: inode is the tenth
                if state == LISTENS and int(address.rpartition(":")[2], 16) == port:
                    inodes.add(others[5])
    return inodes


def _opened_by(pid: int) -> set[str]:
    """What a process has open: sockets by their inodes, and files by their paths."""
    opened = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                opened.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    return opened
