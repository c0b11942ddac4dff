"""A Ray cluster, joined or started here, and the agents of its devices. Only this file imports Ray."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.catalogue.devices import known_type
from harness.cluster.agent import Agent, Answer, Device, Order
from harness.errors import FAILED, HarnessError, NothingRan, UsageError, one_line
from harness.machine.device import steers
from harness.paths import ROOT
from kernels.platform import devices

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Where this is 0, Ray keeps to 127.0.0.1 and forms no cluster, as on Windows and macOS by default."""
THREADS_ASKED = "KERNEL_BENCH_THREADS_ASKED"
"""Tells an agent that OMP_NUM_THREADS is the driver's, and not what Ray sets for tasks of its own."""
LONG_PATH = 40
"""Ray gets another temporary folder if the path is this long: paths of its sockets there have at most 107."""
HEAD_S = 2.0  # seconds to wait for one connection to the head
HEAD_GONE_S = 6.0  # after so many seconds without a connection the head is gone
TYPE = "device:"  # a node's custom resource that begins so names the type of its devices: `device:MI300X`
ACCELERATOR = "accelerator_type:"
START_S = 90.0
"""Seconds for a node to load Python and the suite. An actor that takes longer to begin waits for a device
that another driver has."""
BEAT_S = 10.0  # seconds between signs of life that an agent is asked for
HANG_S = 60.0  # an agent hangs if it gives no sign of life for so many seconds


def join(address: str) -> ModuleType:
    """Returns Ray, with its cluster joined. Raises NothingRan where Ray is not installed, UsageError where
    there is no such cluster. address: HOST:PORT of the head, or `auto`: the cluster whose head is on this
    machine, or else one that is started here with the devices of this machine"""
    if importlib.util.find_spec("ray") is None:
        raise NothingRan(
            "--cluster needs Ray, which is not installed: python tools/set_up.py --extra cluster"
        )
    is_auto = address == "auto"
    address = _running_cluster() if is_auto else address
    if address and (reason := _refusal(address)):
        raise UsageError(f"no Ray cluster at {address!r}: {reason}")
    if not address or _is_loopback(address):
        # Set before Ray is imported, so that all of its ports, those of nodes too, are this machine's alone.
        os.environ[LOOPBACK_ONLY] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # of nodes that are started here
    try:
        import ray
    except RuntimeError as error:  # about variables that hide devices in another way than Ray wants
        raise UsageError(f"Ray cannot be used here: {one_line(error)}") from None
    # Ray prints pages about nodes that died; the driver says it in a line.
    ray._private.worker.listen_error_messages = lambda *_: None
    options: dict[str, Any] = {"address": "auto" if is_auto else address}  # `auto` finds a token, too
    if not address:
        gpus = len([platform for platform in devices().values() if platform.kind != "cpu"])
        folder = None if len(tempfile.gettempdir()) < LONG_PATH else f"/tmp/ray-{os.getuid()}"
        options = {"address": "local", "include_dashboard": False, "num_gpus": gpus, "_temp_dir": folder}
    try:
        runtime = {"env_vars": _environment()}
        ray.init(log_to_driver=False, logging_level="ERROR", runtime_env=runtime, **options)
    except (OSError, RuntimeError, ValueError) as error:
        if "node info" in str(error):
            how = f"`ray start --address={address}` makes it one"
            raise UsageError(f"this machine is no node of the cluster at {address}: {how}") from None
        token = "" if "RAY_AUTH_MODE" in os.environ else "; if it has a token, set RAY_AUTH_MODE=token"
        where = address or "this node"
        raise UsageError(f"cannot join the Ray cluster at {where}: {one_line(error)}{token}") from None
    return ray


def _running_cluster() -> str:
    """The address in RAY_ADDRESS, or else that of a cluster whose head is this machine; empty if there is
    none. Another machine's cluster is only joined by its address."""
    if address := os.environ.get("RAY_ADDRESS", ""):
        return address
    file = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    address = file.read_text("utf-8").strip() if file.exists() else ""
    here = address.startswith(("127.", f"{_our_address()}:"))
    return address if here and not _refusal(address) else ""


def _refusal(address: str, seconds: float = 5.0) -> str:
    """Why no head answers at an address; empty if one does. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:
        return "write HOST:PORT"
    return ""


def _is_loopback(address: str) -> bool:
    """Whether the head answers at 127.0.0.1 and not at the address by which other machines reach this
    one, which Ray must then not use."""
    host, _, port = address.rpartition(":")
    ours = _our_address()
    loopback = socket.gethostbyname(host).startswith("127.")
    return loopback and (ours.startswith("127.") or bool(_refusal(f"{ours}:{port}")))


def _our_address() -> str:
    """The address by which other machines would reach this one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _environment() -> dict[str, str]:
    """The variables of agents: those of the driver that steer kernels, and the path of the suite. Variables
    that hide devices are left out, as Ray sets them for each agent."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if steers(name) and not name.endswith(("_VISIBLE_DEVICES", "_DEVICE_ORDINAL"))
    }
    if "OMP_NUM_THREADS" in os.environ:
        variables[THREADS_ASKED] = "1"
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return variables | {"PYTHONPATH": os.pathsep.join(path)}


class PoolGone(HarnessError):
    """The cluster is gone, for the reason given."""


def require_head(address: str) -> None:
    """Waits until the head of a cluster answers. Raises PoolGone if it does not within HEAD_GONE_S. This
    comes before each call of Ray's: without a head, Ray would wait for a minute and then end this process."""
    until = time.monotonic() + HEAD_GONE_S
    while _refusal(address, HEAD_S):
        if time.monotonic() >= until:
            raise PoolGone(f"the cluster's head at {address} is gone")
        time.sleep(0.2)


class RayAgent(Agent):
    """An agent in a process of Ray's."""

    def __init__(self) -> None:
        super().__init__()
        if not os.environ.pop(THREADS_ASKED, ""):
            os.environ.pop("OMP_NUM_THREADS", None)

    def answer(self, id: str, order: Order) -> Answer:
        self.notes = _without_niceness()
        return super().answer(id, order)

    def beat(self) -> None:
        """Does nothing: the answer is a sign of life, also while an order is obeyed."""


def _without_niceness() -> list[str]:
    """Takes back the niceness that Ray gives its processes. Returns a note where that is not allowed."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= 0:
        return []
    try:
        for thread in Path("/proc/self/task").glob("[0-9]*"):  # on Linux each thread has its own niceness
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
    except OSError:
        return [f"Ray runs it at niceness {niceness}: start its node with RAY_worker_niceness=0"]
    return []


@dataclass
class _Actor:
    """A Ray actor with an agent. Its calls return references to their results."""

    agent: Any
    beat: Any  # reference to the sign of life that was asked for last
    asked: float  # when it was asked for, by time.monotonic
    task: Any = None  # reference to the answer to the order that the agent obeys
    begun: bool = False  # whether the actor has given a sign of life


class RayPool:
    """The devices of a Ray cluster, which come and go, each with an agent that is started for it. It has the
    methods of `harness.cluster.agent.ThisMachine`; `devices` and `wait` raise PoolGone."""

    grows = True

    def __init__(self, address: str, type: str | None = None, agent: type[Any] = RayAgent) -> None:
        """address: as for `join`; type: of the devices that are used; agent: a class like RayAgent"""
        self.ray = join(address)
        self.head: str = self.ray.get_runtime_context().gcs_address
        self.type = known_type(type) if type else None
        self.agent = agent
        self.actors: dict[str, _Actor] = {}

    def devices(self) -> Sequence[Device]:
        require_head(self.head)
        with_host: list[tuple[str, Device]] = []
        for node in self.ray.nodes():
            if node["Alive"]:
                with_host += [(node["NodeManagerHostname"], device) for device in _devices(node)]
        cpu_devices = Counter(host for host, device in with_host if not device.is_gpu)
        return [
            replace(device, devices_on_machine=max(1, cpu_devices[host]))
            for host, device in with_host
            if self.type in (None, device.type)
        ]

    def send(self, id: str, order: Order) -> None:
        if isinstance(order, Device):  # the first order to a device, which has no agent yet
            self.actors[id] = self._new_actor(order)
        self.actors[id].task = self.actors[id].agent.answer.remote(id, order)

    def _new_actor(self, device: Device) -> _Actor:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resources = dict(device.resources)
        remote = self.ray.remote(self.agent).options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=NodeAffinitySchedulingStrategy(device.node, soft=False),
            max_concurrency=2,
            max_restarts=0,
        )
        agent = remote.remote()
        return _Actor(agent, agent.beat.remote(), time.monotonic())

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        require_head(self.head)
        working = {actor.task: id for id, actor in self.actors.items() if actor.task is not None}
        if not working:
            time.sleep(min(timeout_s, 0.2))
            return self._check_life()
        ready, _ = self.ray.wait(list(working), timeout=timeout_s)
        return [*(self._answer(working[reference]) for reference in ready), *self._check_life()]

    def _answer(self, id: str) -> Answer:
        task = self.actors[id].task
        self.actors[id].task = None
        try:
            return self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            return Answer(id, None, f"its agent is gone ({_cause(error)})", lost=True)

    def _check_life(self) -> list[Answer]:
        """Asks agents for the next sign of life where the last one came. Returns answers for those that gave
        none for too long or cannot begin."""
        now = time.monotonic()
        silent = []
        for id, actor in self.actors.items():
            answered, _ = self.ray.wait([actor.beat], timeout=0)
            if answered:
                with contextlib.suppress(self.ray.exceptions.RayError):  # the order's own answer tells it
                    self.ray.get(actor.beat)
                actor.begun = True
                if now > actor.asked + BEAT_S:
                    actor.beat = actor.agent.beat.remote()
                    actor.asked = now
            elif actor.begun and now > actor.asked + HANG_S:
                silent.append(Answer(id, None, f"no sign of life for {HANG_S:g} s", lost=True))
            elif not actor.begun and now > actor.asked + START_S:
                why = "another driver has the device, or its node hangs"
                silent.append(Answer(id, None, f"no agent within {START_S:g} s: {why}"))
        return silent

    def stop(self, id: str) -> None:
        if (actor := self.actors.pop(id, None)) is not None:
            with contextlib.suppress(Exception):  # the actor or the head may be gone already
                require_head(self.head)
                self.ray.kill(actor.agent)

    def close(self) -> None:
        """Leaves the cluster too, and ends one that was started here."""
        try:
            require_head(self.head)
        except PoolGone:
            # Ray's own end would wait for the head, and Python's would crash in Ray's threads.
            atexit.register(_end)
            return
        for id in list(self.actors):
            self.stop(id)
        self.ray.shutdown()


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)


def _devices(node: dict[str, Any]) -> list[Device]:
    """A node's devices: its GPUs; without any GPU, all of its CPUs as one device."""
    resources: dict[str, float] = node["Resources"]
    name = f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"
    gpus = int(resources.get("GPU", 0))
    cpus = resources.get("CPU", 0.0)
    type_name = next((name for name in resources if name.startswith(TYPE)), "")
    if gpus:
        model = next((name for name in resources if name.startswith(ACCELERATOR)), "gpu")
        type = known_type(model.removeprefix(ACCELERATOR))
        ids = [f"{name}-gpu{i}" for i in range(gpus)]
        takes = {"GPU": 1.0}
    else:
        type = "cpu"
        ids = [name] if cpus else []
        takes = {"CPU": cpus}
    if type_name:
        type = type_name.removeprefix(TYPE)
        takes[type_name] = 1.0
    return [Device(id, type, is_gpu=gpus > 0, node=node["NodeID"], resources=takes) for id in ids]


def _cause(error: Exception) -> str:
    """The cause in Ray's many lines."""
    text = " ".join(str(error).split())
    if "node" in text and ("dead" in text or "died" in text):
        return "its node died"
    return type(error).__name__
