"""Server of one launch: started on a port of its own, waited for, known to be ours, ended."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.machine.provenance import steers
from harness.serving.ab.plan import CONTAINERS, Command
from harness.serving.ab.process import Guarded

# Straight to loopback: a proxy of the environment has no part in this.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# A parent that hangs after one of these never serves: vLLM v1/engine and executor, SGLang engine.py:1978 and
# scheduler.py:6372 of 0.5.23.
FATAL = re.compile(
    r"WorkerProc initialization failed|EngineCore failed to start|Engine core initialization failed|"
    r"Failed core proc\(s\)|EngineDeadError|Received sigquit from a child process|"
    r"Scheduler hit an exception|scheduler died during initialization"
)
IN_USE = re.compile("address already in use", re.IGNORECASE)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|AUTH", re.IGNORECASE)
LISTENS = "0A"  # a socket's state in /proc/net/tcp
# Keys of /server_info that differ between any two launches.
OF_ONE_LAUNCH = re.compile(
    r"(^|\.)(port|host|nccl_port|dist_init_addr|random_seed|startup_time|launch_command|internal_states|"
    r"pid|api_key|served_model_name|max_total_num_tokens|memory_usage|\w*_log_\w*dir\w*)($|\.)"
)


class RunFailed(HarnessError):
    """A launch or a client's run that does not count: one line with the reason."""


class PortTaken(RunFailed):
    """Another process has the port; the same launch on another one may do."""


class Server:
    """Of one launch; all its processes have ended when its context has.

    log: in the launch's folder, in which the command runs
    """

    def __init__(self, command: Command, port: int, log: Path, keep: int, grace: float, stop: Command | None):
        self.command, self.port, self.grace = command, port, grace
        self.url = f"http://127.0.0.1:{port}"
        words = stop.words if stop else ()
        self.process = Guarded(
            command.words, command.environment(), log, keep=keep, grace=grace, stop=words
        )  # fmt: skip

    def wait_ready(self, path: str, timeout_s: float, tick: Callable[[float], None]) -> float:
        """Seconds until it answered. Raises RunFailed when it dies, is not there in time, or when another
        process listens on its port."""
        started, pause = time.monotonic(), 0.05
        while (passed := time.monotonic() - started) < timeout_s:
            self.check("before it served")
            if self.get(path, 30.0) is not None:
                if self.owned() is False:
                    raise PortTaken(f"another process, not this server, answers on port {self.port}")
                return time.monotonic() - started
            tick(passed)
            self.process.wait(pause)
            pause = min(1.0, pause * 1.3)
        raise RunFailed(
            f"it did not serve within {timeout_s:g} s (ready_timeout); {self.process.last_words()}"
        )

    def check(self, when: str) -> None:
        """Raises RunFailed where it has ended, or has said that it cannot serve any more."""
        if self.process.wait() is not None:
            words = self.process.last_words()
            kind = PortTaken if IN_USE.search(words) else RunFailed
            raise kind(f"the server {self.process.how_it_ended()} {when}; {words}")
        if line := self.process.said(FATAL):
            raise RunFailed(f"the server failed {when}: {line!r} (log: {self.process.log})")

    def get(self, path: str, timeout_s: float = 10.0, post: bool = False) -> str | None:
        """What it answers with 200; None for anything else."""
        request = urllib.request.Request(f"{self.url}{path}", data=b"" if post else None)
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                return answer.read().decode(errors="replace") if answer.status == 200 else None
        except (OSError, urllib.error.URLError, ValueError):
            return None

    def owned(self) -> bool | None:
        """Whether a process of this launch listens on the port; None: it cannot be told (a container's
        sockets are not those of the command that started it)."""
        if Path(self.command.words[0]).name in (*CONTAINERS, "srun", "enroot", "sudo"):
            return None
        sockets = listening(self.port)
        if not sockets:
            return None
        mine = {inode for pid in self.process.pids() for inode in _sockets_of(pid)}
        return bool(sockets & mine)

    def identity(self) -> dict[str, Any]:
        """What it says of itself, and the variables that it was started with."""
        info = _json(self.get("/server_info"))
        models = _json(self.get("/v1/models")).get("data")
        model = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        engine = str(model.get("owned_by") or "")
        version = info.get("version") or _json(self.get("/version")).get("version") or ""
        return {
            "engine": "sglang" if "internal_states" in info else engine,
            "version": str(version),
            "model": str(model.get("id", "")),
            "owned": self.owned(),
            "server_info": {k: v for k, v in flat(info).items() if not OF_ONE_LAUNCH.search(k)},
            "environment": self.environment(),
        }

    def environment(self) -> dict[str, str]:
        """Variables of the process that listens, or of the command: those that steer kernels and those that
        the plan sets, without secrets."""
        sockets = listening(self.port)
        pids = [pid for pid in self.process.pids() if sockets & set(_sockets_of(pid))]
        for pid in (*pids, self.process.pid):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                found = dict(line.split("=", 1) for line in lines if "=" in line)
                return {
                    name: value
                    for name, value in sorted(found.items())
                    if (steers(name) or name in self.command.variables) and not SECRET.search(name)
                }
        return {}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.end()


def free_port(first: int) -> int:
    """The first one from there on, in steps of ten, on which nothing listens: engines take the next ones for
    themselves. Nothing holds it until the server does; what comes in between is found out by its socket."""
    for port in range(first, 65000, 10):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    raise RunFailed(f"no port from {first} on is free")


def listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on a port; empty where the system does not tell."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """`a.b` -> each value of nested objects that is no object."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        k: v for key, each in value.items() for k, v in flat(each, f"{name}.{key}" if name else key).items()
    }


def _sockets_of(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    found.append(target[8:-1])
    return found


def _json(text: str | None) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(text or "")
        return value if isinstance(value, dict) else {}
    return {}
