"""A Ray cluster: joined, or started on this machine; its devices, with an agent in an actor of Ray's on each;
and its CPUs, on which kernels are compiled. Only this file imports Ray."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.catalogue.devices import known_type
from harness.cluster.agent import Agent, Answer, Device, Opened, Opening, Order
from harness.compile.compiler import CompileEach, Resources, compile_launch
from harness.compile.launches import KernelLaunch
from harness.errors import FAILED, HarnessError, NothingRan, UsageError, one_line
from harness.machine.device import steers
from harness.paths import ROOT
from kernels.platform import devices, version

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's name for not forming clusters with other machines, as on those systems: it keeps to 127.0.0.1."""
THREADS_ASKED = "KERNEL_BENCH_THREADS_ASKED"
"""Tells an agent that OMP_NUM_THREADS is the driver's, and not what Ray sets for tasks of its own."""
LONG_PATH = 40
"""Of the temporary folder, in characters: Ray keeps sockets below it, whose paths may have 107."""
HEAD_S, HEAD_GONE_S = 2.0, 6.0
"""Seconds for the head to take a connection, and after which it is gone if it takes none."""
TYPE = "device:"  # a node's custom resource that begins so names the type of its devices: `device:MI300X`
ACCELERATOR = "accelerator_type:"
START_S = 90.0
"""Seconds for an actor to begin: its node loads Python and the suite. Longer, and another driver has its
device."""
BEAT_S, HANG_S = 10.0, 60.0
"""Seconds between signs of life that an agent is asked for, and after which it hangs if it gives none."""
PROBE_S = 120.0  # seconds for a node to tell its version of Triton


def join(address: str) -> ModuleType:
    """Returns Ray, with its cluster joined. Raises NothingRan where Ray is not installed, UsageError where
    there is no such cluster.

    address: HOST:PORT of the head, or `auto`: the cluster whose head is on this machine, or else one that is
    started here with the devices of this machine
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
        # Set before Ray is imported, so that all of its ports, those of nodes too, are this machine's alone.
        os.environ[LOOPBACK_ONLY] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # of nodes that are started here
    try:
        import ray
    except RuntimeError as error:  # about variables that hide devices in another way than Ray wants
        raise UsageError(f"Ray cannot be used here: {one_line(error)}") from None
    # Ray prints pages about nodes that died; the driver says it in a line.
    ray._private.worker.listen_error_messages = lambda *_: None
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": _environment()},
    }
    try:
        if address:
            ray.init(address="auto" if looked_for else address, **quiet)  # `auto` also looks for a token
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


def _running() -> str:
    """The cluster that RAY_ADDRESS names, or else one whose head is this machine; empty if there is none.
    Another machine's cluster is only joined by its address."""
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
    """Raises UsageError where no head answers; Ray itself would try for minutes."""
    try:
        socket.create_connection(_split(address), 5).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or "write HOST:PORT"
        raise UsageError(f"no Ray cluster at {address!r}: {reason}") from None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _is_loopback(address: str) -> bool:
    """Whether the head answers on this machine only; then Ray must not use the machine's other address."""
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
    """The address by which other machines would reach this one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _environment() -> dict[str, str]:
    """The variables of agents: those of the driver that steer kernels, and the path of the suite. Ray says
    which devices an agent sees."""
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


class Head:
    """The head of a cluster that was joined. Where it is gone, Ray's own calls wait for it for a minute and
    then end this process; so it is asked before each call."""

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
        """Leaves the cluster, and ends one that was started here."""
        if self.gone:
            # Ray's own end would wait for the head, and Python's would crash in Ray's threads.
            atexit.register(_end)
        else:
            self.ray.shutdown()


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)


class RayAgent:
    """An `Agent` in a process of Ray's."""

    def __init__(self) -> None:
        if not os.environ.pop(THREADS_ASKED, ""):
            os.environ.pop("OMP_NUM_THREADS", None)
        self.agent = Agent()

    def obey(self, order: Order) -> Answer:
        slow = _without_niceness()
        answer = self.agent.answer(order)
        if slow and isinstance(answer.result, Opened):
            facts = replace(answer.result.facts, busy=[*answer.result.facts.busy, slow])
            answer = replace(answer, result=replace(answer.result, facts=facts))
        return answer

    def beat(self) -> bool:
        """A sign of life, given beside what the agent does."""
        return True


def _without_niceness() -> str:
    """Takes back the niceness that Ray gives its processes, for each thread, as Linux has it. Returns a note
    where that is not allowed."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        for thread in Path("/proc/self/task").glob("[0-9]*") if niceness > 0 else ():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
    except OSError:
        return f"Ray runs it at niceness {niceness}: start its node with RAY_worker_niceness=0"
    return ""


@dataclass
class _Actor:
    """A Ray actor with an agent. Its calls give references to what they will return."""

    actor: Any
    beat: Any  # the sign of life that was asked for last
    asked: float  # when it was
    begun: bool = False  # whether the actor has given a sign of life
    task: Any = None  # the order that it obeys


class RayPool:
    """The devices of a Ray cluster, which come and go, each with an agent that is started for it. It has the
    methods of `harness.cluster.agent.ThisMachine`; `devices` and `wait` raise PoolGone."""

    grows = True

    def __init__(self, address: str, types: Sequence[str] = (), agent: type[Any] = RayAgent) -> None:
        """address: as for `join`; types: of the devices that are used, all by default; agent: has RayAgent's
        methods"""
        self.ray = join(address)
        self.head = Head(self.ray)
        self.types, self.agent = set(types), agent
        self.actors: dict[str, _Actor] = {}
        self.known: Sequence[Device] = ()

    def devices(self) -> Sequence[Device]:
        if self.head.answers():
            nodes = [node for node in self.ray.nodes() if node["Alive"]]
            there = [(node["NodeManagerHostname"], device) for node in nodes for device in _devices(node)]
            hosts = Counter(host for host, device in there if not device.is_gpu)
            self.known = [
                replace(device, beside=max(1, hosts[host]))
                for host, device in there
                if not self.types or device.type in self.types
            ]
        return self.known

    def start(self, opening: Opening) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        device, resources = opening.device, dict(opening.device.resources)
        actor = (
            self.ray.remote(self.agent)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy=NodeAffinitySchedulingStrategy(device.node, soft=False),
                max_concurrency=2,
                max_restarts=0,
            )
            .remote()
        )
        self.actors[device.id] = _Actor(actor, actor.beat.remote(), time.monotonic())
        self.send(device.id, opening)

    def send(self, id: str, order: Order) -> None:
        actor = self.actors[id]
        actor.task = actor.actor.obey.remote(order)

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        if not self.head.answers():
            time.sleep(min(timeout_s, 0.2))
            return []
        working = {actor.task: id for id, actor in self.actors.items() if actor.task is not None}
        if not working:
            time.sleep(min(timeout_s, 0.2))
            return self._silent()
        ready, _ = self.ray.wait(list(working), num_returns=len(working), timeout=0)
        if not ready:
            ready, _ = self.ray.wait(list(working), num_returns=1, timeout=timeout_s)
        return [*(self._answer(working[ref], ref) for ref in ready), *self._silent()]

    def _answer(self, id: str, ref: Any) -> Answer:
        self.actors[id].task = None
        try:
            answer: Answer = self.ray.get(ref)
            return replace(answer, device=id)
        except self.ray.exceptions.RayError as error:
            return Answer(id, None, f"its agent is gone ({_cause(error)})", lost=True)

    def _silent(self) -> list[Answer]:
        """Answers for agents that gave no sign of life for too long, or that cannot begin."""
        now, lost = time.monotonic(), []
        for id, actor in self.actors.items():
            answered, _ = self.ray.wait([actor.beat], timeout=0)
            if answered:
                with contextlib.suppress(self.ray.exceptions.RayError):  # the order's own answer tells it
                    self.ray.get(actor.beat)
                actor.begun = True
                if now > actor.asked + BEAT_S:
                    actor.asked, actor.beat = now, actor.actor.beat.remote()
            elif actor.begun and now > actor.asked + HANG_S:
                lost.append(Answer(id, None, f"no sign of life for {HANG_S:g} s", lost=True))
            elif not actor.begun and now > actor.asked + START_S:
                why = "another driver has the device, or its node hangs"
                lost.append(Answer(id, None, f"no agent within {START_S:g} s: {why}"))
        return lost

    def stop(self, id: str) -> None:
        if (actor := self.actors.pop(id, None)) is not None:
            with contextlib.suppress(Exception):  # the actor or the head may be gone already
                if self.head.answers():
                    self.ray.kill(actor.actor)

    def close(self) -> None:
        if not self.head.gone:
            for id in list(self.actors):
                self.stop(id)
        self.head.leave()


def _devices(node: dict[str, Any]) -> list[Device]:
    """A node's devices: its GPUs; without any GPU, all of its CPUs as one device."""
    resources: dict[str, float] = node["Resources"]
    named = [name for name in resources if name.startswith(TYPE)]
    gpus = int(resources.get("GPU", 0))
    models = [name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)]
    if named:
        type = named[0].removeprefix(TYPE)
    else:
        type = known_type(models[0] if models else "gpu") if gpus else "cpu"
    takes, node_id = dict.fromkeys(named[:1], 1.0), node["NodeID"]
    where = f"{node['NodeManagerHostname']}-{node_id[:6]}"
    if gpus:
        takes["GPU"] = 1.0
        names = [f"{where}-gpu{i}" for i in range(gpus)]
        return [Device(name, type, is_gpu=True, node=node_id, resources=takes) for name in names]
    if not resources.get("CPU"):
        return []
    takes["CPU"] = resources["CPU"]
    return [Device(where, type, node=node_id, resources=takes)]


def _cause(error: Exception) -> str:
    """The cause in Ray's many lines."""
    text = " ".join(str(error).split())
    if "node" in text and ("dead" in text or "died" in text):
        return "its node died"
    return type(error).__name__


def compile_on(address: str) -> CompileEach:
    """Returns what compiles launches on the CPUs of a cluster. Raises UsageError where a node has another
    Triton, NothingRan or UsageError where there is no cluster.

    address: as for `join`
    """
    ray = join(address)
    head = Head(ray)
    _require_same_triton(ray)

    def compile_each(todo: Mapping[str, KernelLaunch]) -> Iterator[tuple[str, Resources]]:
        task = ray.remote(compile_launch).options(num_cpus=1, max_retries=2)
        keys = {task.remote(launch.kernel, launch.arch, launch.data): key for key, launch in todo.items()}
        while keys:
            head.answers()
            ready, _ = ray.wait(list(keys), num_returns=1, timeout=2)
            for ref in ready:
                key = keys.pop(ref)
                try:
                    yield key, ray.get(ref)
                except ray.exceptions.RayError as error:
                    yield key, Resources(error=f"compiling failed: its node gave {type(error).__name__}")

    return compile_each


def _require_same_triton(ray: Any) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ours, task = version("triton"), ray.remote(_triton)
    answers = {
        node["NodeManagerHostname"]: task.options(
            num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU")
    }
    for host, answer in answers.items():
        try:
            theirs = ray.get(answer, timeout=PROBE_S)
        except ray.exceptions.RayError as error:
            raise UsageError(f"{host} does not answer: {type(error).__name__}; are its CPUs taken?") from None
        if theirs != ours:
            raise UsageError(f"{host} has triton {theirs or 'missing'}, this machine {ours}: make them alike")


def _triton() -> str | None:
    return version("triton")
