"""Nodes of a Ray cluster on this machine, each on its own core, that can be killed as a machine would die."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.serving_processes import marked

HOST = "127.0.0.2"  # Ray takes 127.0.0.1 for the machine's other address
MARK = "RAY_NODE_OF_A_TEST"
# Ray starts a server for clients, which nothing here uses: each process has a port for its own, below those
# that the kernel gives away.
CLIENTS_PORT = 20000 + os.getpid() % 10000


@dataclass
class RayNodes:
    temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="kb", dir="/tmp")))
    """Ray's folder. Its path is short because there are sockets in it."""
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Ray has chosen the port: another cluster could have taken one chosen here before Ray binds it."""
        return (self.temporary / "ray_current_cluster").read_text()

    @property
    def environment(self) -> dict[str, str]:
        quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        return {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | quiet

    def start(self, name: str, type: str = "", core: int | None = None, **environment: str) -> None:
        """Starts a node; the first is the head, and one without a type has no device. core: of all its
        processes"""
        mark = self.marks[name] = uuid.uuid4().hex
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        command += [f"--node-ip-address={HOST}", "--object-store-memory=80000000"]
        if len(self.marks) == 1:
            command += ["--head", "--port=0", "--include-dashboard=false"]
            command += [f"--temp-dir={self.temporary}", f"--ray-client-server-port={CLIENTS_PORT}"]
        else:
            command += [f"--address={self.address}"]
        command += [f"--num-cpus={1 if type else 0}"]
        if type:
            command += [f'--resources={{"device:{type}": 1}}']
        if core in os.sched_getaffinity(0):
            command = ["taskset", "-c", str(core), *command]
        done = subprocess.run(
            command,
            env=self.environment | {MARK: mark, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout

    def kill(self, name: str) -> None:
        """Kills all processes of a node at once."""
        for pid in marked(self.marks.pop(name), MARK):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def agents(self, name: str) -> list[int]:
        """Processes of drivers' agents on a node, without those of Ray."""
        return [pid for pid in marked(self.marks[name], MARK) if b"SleepingAgent" in _command(pid)]

    def close(self) -> None:
        for name in list(self.marks):
            self.kill(name)
        shutil.rmtree(self.temporary, ignore_errors=True)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
