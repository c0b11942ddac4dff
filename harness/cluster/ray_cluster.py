"""A Ray cluster joined, or one started on this machine alone. Only the files called `ray_*` import Ray."""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.cluster.pool import PoolGone
from harness.errors import FAILED, NothingRan, UsageError, one_line
from harness.machine.provenance import steers
from harness.paths import ROOT
from kernels.platform import devices

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""What Ray calls it: without clusters, as on those systems, it keeps to 127.0.0.1."""
THREADS_ASKED = "KERNEL_BENCH_THREADS_ASKED"
"""Tells an agent that OMP_NUM_THREADS is the driver's, and not what Ray sets for tasks of its own."""
LONG_PATH = 40
"""Of the temporary folder, in characters: Ray keeps sockets below it, whose paths may have 107."""
HEAD_S, HEAD_GONE_S = 2.0, 6.0
"""For the head to take a connection, and how long it may take none."""


def join(address: str) -> ModuleType:
    """Ray, with its cluster joined. Raises NothingRan where it is not installed, UsageError where there is no
    such cluster.

    address: of its head, or `auto`: the cluster whose head is on this machine, or else one that is started
        here with the devices of this machine
    """
    if importlib.util.find_spec("ray") is None:
        raise NothingRan(
            "--cluster needs Ray, which is not installed: python tools/set_up.py --extra cluster"
        )
    looked_for = address == "auto"
    address = _running() if looked_for else address
    if address:
        _require_answer(address)
    if not address or _is_loopback(address):
        # Before Ray is imported: all of its ports, of the nodes too, are this machine's alone.
        os.environ[LOOPBACK_ONLY] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # of nodes that are started here
    try:
        import ray
    except RuntimeError as error:  # of variables that hide devices otherwise than it wants
        raise UsageError(f"Ray cannot be used here: {one_line(error)}") from None
    # It prints what befell nodes, pages of it; the driver says that in a line.
    ray._private.worker.listen_error_messages = lambda *_: None
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": _environment()},
    }
    try:
        if address:
            ray.init(address="auto" if looked_for else address, **quiet)  # it looks for a token only then
        else:
            gpus = sum(platform.kind != "cpu" for platform in devices().values())
            folder = None if len(tempfile.gettempdir()) < LONG_PATH else f"/tmp/ray-{os.getuid()}"
            ray.init(address="local", include_dashboard=False, num_gpus=gpus, _temp_dir=folder, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        if "node info" in str(error):
            how = f"`ray start --address={address}` makes it one"
            raise UsageError(f"this machine is no node of the cluster at {address}: {how}") from None
        token = "" if "RAY_AUTH_MODE" in os.environ else "; of one with a token: set RAY_AUTH_MODE=token"
        where = address or "this node"
        raise UsageError(f"cannot join the Ray cluster at {where}: {one_line(error)}{token}") from None
    return ray


class Head:
    """Of a cluster that was joined. Ray's own calls of one that is gone wait for it, for a minute, and then
    end this process."""

    def __init__(self, ray: ModuleType) -> None:
        self.ray = ray
        self.address = _split(ray.get_runtime_context().gcs_address)
        self.answered = time.monotonic()
        self.gone = False

    def answers(self) -> bool:
        """Raises PoolGone where it has not answered for a while."""
        try:
            socket.create_connection(self.address, HEAD_S).close()
            self.answered = time.monotonic()
            return True
        except OSError:
            if time.monotonic() < self.answered + HEAD_GONE_S:
                return False
        self.gone = True
        raise PoolGone("the cluster's head at {}:{} is gone".format(*self.address)) from None

    def leave(self) -> None:
        """Leaves the cluster; of one that was started here ends it."""
        if self.gone:
            # Ray's own end would wait for the head, and Python's would crash in Ray's threads.
            atexit.register(_end)
        else:
            self.ray.shutdown()


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)


def _running() -> str:
    """The cluster that RAY_ADDRESS names, or else one whose head is this machine; empty if there is none.
    Another machine's is joined only by its address."""
    if address := os.environ.get("RAY_ADDRESS", ""):
        return address
    file = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    address = file.read_text().strip() if file.exists() else ""
    try:
        _require_answer(address)
        host = _split(address)[0]
    except UsageError:
        return ""
    return address if host == _our_address() or host.startswith("127.") else ""


def _require_answer(address: str) -> None:
    """Ray itself tries for minutes. Raises UsageError."""
    try:
        socket.create_connection(_split(address), 5).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or "write HOST:PORT"
        raise UsageError(f"no Ray cluster at {address!r}: {reason}") from None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _is_loopback(address: str) -> bool:
    """Whether the head answers on this machine only: Ray then must not go by the machine's other address."""
    host, port = _split(address)
    if not socket.gethostbyname(host).startswith("127."):
        return False
    ours = _our_address()
    try:
        socket.create_connection((ours, port), 5).close()
    except OSError:
        return True
    return ours.startswith("127.")


def _our_address() -> str:
    """Of this machine, from which others would be reached."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _environment() -> dict[str, str]:
    """Of agents: the driver's variables that steer kernels, and the suite on the path. Which devices an agent
    sees is Ray's to say."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if steers(name) and not name.endswith(("_VISIBLE_DEVICES", "_DEVICE_ORDINAL"))
    }
    if "OMP_NUM_THREADS" in os.environ:
        variables[THREADS_ASKED] = "1"
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return variables | {"PYTHONPATH": os.pathsep.join(path)}
