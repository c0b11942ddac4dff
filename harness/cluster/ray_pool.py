"""The pool of a Ray cluster's devices: an actor on each. The only file that imports Ray."""

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
from typing import Any

from harness.catalogue.devices import known_type
from harness.cluster.agent import Agent
from harness.cluster.orders import Answer, Order
from harness.cluster.pool import Offer, PoolGone
from harness.errors import FAILED, HarnessError, NothingRan, UsageError, one_line
from harness.machine.provenance import steers
from harness.paths import ROOT
from kernels.platform import devices

TYPE = "device:"
"""A node's custom resource of this beginning names its devices' type: `device:MI300X`."""
ACCELERATOR = "accelerator_type:"
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""What Ray calls it: without clusters, as on those systems, it keeps to 127.0.0.1."""
THREADS_ASKED = "KERNEL_BENCH_THREADS_ASKED"
"""Tells an agent that OMP_NUM_THREADS is the driver's, and not what Ray sets for tasks of its own."""
START_S = 90.0
"""For an actor to begin. Its node loads Python and the suite; longer, and another driver has its device."""
BEAT_S, HANG_S = 10.0, 60.0
"""So often an agent is asked for a sign of life, and so long it may give none."""
HEAD_S, HEAD_GONE_S = 2.0, 6.0


class RayAgent:
    """An `Agent` in a process of Ray's."""

    def __init__(self) -> None:
        if not os.environ.pop(THREADS_ASKED, ""):
            os.environ.pop("OMP_NUM_THREADS", None)
        self.agent = Agent()

    def obey(self, order: Order) -> Answer:
        try:
            return Answer("", self.agent.obey(order))
        except HarnessError as error:
            return Answer("", None, str(error))
        except Exception as error:
            return Answer("", None, one_line(error))

    def beat(self) -> bool:
        """A sign of life, beside what it does."""
        return True


@dataclass
class _Slot:
    """On a node, what an actor of its device takes of it."""

    offer: Offer
    host: str
    node: str
    resources: dict[str, float]


@dataclass
class _Seat:
    """An actor. begun: whether it has given a sign of life; beat: what was asked of it last, and when"""

    actor: Any
    asked: float
    beat: Any
    begun: bool = False
    task: Any = None


class RayPool:
    """address: `auto` for the cluster that this node is in, or else one that is started on this node alone;
    or that of a cluster's head. types: only devices of these, if any are named. agent: has RayAgent's
    methods"""

    def __init__(self, address: str, types: Sequence[str] = (), agent: type[Any] = RayAgent) -> None:
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
        import ray

        # It prints what befell nodes, pages of it; the driver says that in a line.
        ray._private.worker.listen_error_messages = lambda *_: None
        self.ray = ray
        self.types, self.agent = set(types), agent
        self.seats: dict[str, _Seat] = {}
        self.slots: dict[str, _Slot] = {}
        self.answered = time.monotonic()
        self.known: Sequence[Offer] = ()
        self.gone = False
        quiet: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": "ERROR",
            "runtime_env": {"env_vars": _environment()},
        }
        try:
            if address:
                ray.init(address="auto" if looked_for else address, **quiet)  # it looks for a token only then
            else:
                ray.init(address="local", include_dashboard=False, num_gpus=_gpus(), **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if "node info" in str(error):
                join = f"`ray start --address={address}` makes it one"
                raise UsageError(f"this machine is no node of the cluster at {address}: {join}") from None
            token = "" if "RAY_AUTH_MODE" in os.environ else "; of one with a token: set RAY_AUTH_MODE=token"
            where = address or "this node"
            raise UsageError(f"cannot join the Ray cluster at {where}: {one_line(error)}{token}") from None
        self.head = _split(ray.get_runtime_context().gcs_address)

    def offers(self) -> Sequence[Offer]:
        if not self._head_answers():
            return self.known
        slots = [slot for node in self.ray.nodes() if node["Alive"] for slot in _slots(node)]
        self.slots = {slot.offer.id: slot for slot in slots}
        hosts = Counter(slot.host for slot in slots if "GPU" not in slot.resources)
        self.known = [
            replace(slot.offer, beside=max(1, hosts[slot.host]))
            for slot in slots
            if not self.types or slot.offer.type in self.types
        ]
        return self.known

    def start(self, offer: Offer) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        slot = self.slots[offer.id]
        resources = dict(slot.resources)
        actor = (
            self.ray.remote(self.agent)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
                max_concurrency=2,
                max_restarts=0,
            )
            .remote()
        )
        self.seats[offer.id] = _Seat(actor, time.monotonic(), actor.beat.remote())

    def send(self, device: str, order: Order) -> None:
        seat = self.seats[device]
        seat.task = seat.actor.obey.remote(order)

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        self._head_answers()
        working = {seat.task: id for id, seat in self.seats.items() if seat.task is not None}
        if not working:
            time.sleep(min(timeout_s, 0.2))
            return self._silent()
        ready, _ = self.ray.wait(list(working), num_returns=len(working), timeout=0)
        if not ready:
            ready, _ = self.ray.wait(list(working), num_returns=1, timeout=timeout_s)
        return [*(self._answer(working[ref], ref) for ref in ready), *self._silent()]

    def _answer(self, id: str, ref: Any) -> Answer:
        self.seats[id].task = None
        try:
            answer: Answer = self.ray.get(ref)
            return Answer(id, answer.result, answer.error)
        except self.ray.exceptions.RayError as error:
            return Answer(id, None, f"its agent is gone ({_cause(error)})", lost=True)

    def _silent(self) -> list[Answer]:
        """Agents that gave no sign of life for too long, or that cannot begin."""
        now, lost = time.monotonic(), []
        for id, seat in self.seats.items():
            answered, _ = self.ray.wait([seat.beat], timeout=0)
            if answered:
                with contextlib.suppress(self.ray.exceptions.RayError):  # what it tasks on tells
                    self.ray.get(seat.beat)
                seat.begun = True
                if now > seat.asked + BEAT_S:
                    seat.asked, seat.beat = now, seat.actor.beat.remote()
            elif now > seat.asked + (HANG_S if seat.begun else START_S):
                if seat.begun:
                    lost.append(Answer(id, None, f"no sign of life for {HANG_S:g} s", lost=True))
                else:
                    why = "another driver has the device, or its node hangs"
                    lost.append(Answer(id, None, f"no agent within {START_S:g} s: {why}"))
        return lost

    def _head_answers(self) -> bool:
        """Ray's own calls of a head that is gone wait for it, for a minute, and then end this process. Raises
        PoolGone where it has not answered for a while."""
        try:
            socket.create_connection(self.head, HEAD_S).close()
            self.answered = time.monotonic()
            return True
        except OSError:
            if time.monotonic() < self.answered + HEAD_GONE_S:
                return False
        self.gone = True
        raise PoolGone(f"the cluster's head at {self.head[0]}:{self.head[1]} is gone") from None

    def stop(self, device: str) -> None:
        if (seat := self.seats.pop(device, None)) is not None:
            with contextlib.suppress(Exception):  # of an actor that is gone already
                self.ray.kill(seat.actor)

    def close(self) -> None:
        if self.gone:
            # Its own end would wait for the head, and Python's would crash in its threads.
            atexit.register(_end)
            return
        for id in list(self.seats):
            self.stop(id)
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
    """Of agents: the driver's variables that steer kernels, and the suite on the path."""
    variables = {name: value for name, value in os.environ.items() if steers(name)}
    if "OMP_NUM_THREADS" in os.environ:
        variables[THREADS_ASKED] = "1"
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return variables | {"PYTHONPATH": os.pathsep.join(path)}


def _gpus() -> int:
    return sum(platform.kind != "cpu" for platform in devices().values())


def _slots(node: dict[str, Any]) -> list[_Slot]:
    """A node's devices: its GPUs; of a node without any, its CPUs as one."""
    resources: dict[str, float] = node["Resources"]
    named = [name for name in resources if name.startswith(TYPE)]
    gpus = int(resources.get("GPU", 0))
    models = [name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)]
    if named:
        type = named[0].removeprefix(TYPE)
    else:
        type = known_type(models[0] if models else "gpu") if gpus else "cpu"
    takes = dict.fromkeys(named[:1], 1.0)
    host, id = node["NodeManagerHostname"], node["NodeID"]
    where = f"{host}-{id[:6]}"
    if gpus:
        offers = [Offer(f"{where}-gpu{i}", type) for i in range(gpus)]
        return [_Slot(offer, host, id, takes | {"GPU": 1.0}) for offer in offers]
    if not resources.get("CPU"):
        return []
    return [_Slot(Offer(where, type), host, id, takes | {"CPU": resources["CPU"]})]


def _cause(error: Exception) -> str:
    """Of Ray's many lines the one that tells."""
    text = " ".join(str(error).split())
    if "node" in text and ("dead" in text or "died" in text):
        return "its node died"
    return type(error).__name__
