"""The pool of a Ray cluster's devices: an actor on each."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.catalogue.devices import known_type
from harness.cluster.agent import Agent
from harness.cluster.orders import Answer, Opened, Order
from harness.cluster.pool import Offer
from harness.cluster.ray_cluster import THREADS_ASKED, Head, join
from harness.errors import HarnessError, one_line

TYPE = "device:"
"""A node's custom resource of this beginning names its devices' type: `device:MI300X`."""
ACCELERATOR = "accelerator_type:"
START_S = 90.0
"""For an actor to begin. Its node loads Python and the suite; longer, and another driver has its device."""
BEAT_S, HANG_S = 10.0, 60.0
"""So often an agent is asked for a sign of life, and so long it may give none."""


class RayAgent:
    """An `Agent` in a process of Ray's."""

    def __init__(self) -> None:
        if not os.environ.pop(THREADS_ASKED, ""):
            os.environ.pop("OMP_NUM_THREADS", None)
        self.agent = Agent()

    def obey(self, order: Order) -> Answer:
        slow = _as_others_run()
        try:
            result = self.agent.obey(order)
            if isinstance(result, Opened) and slow:
                facts = replace(result.facts, busy=[*result.facts.busy, slow])
                result = replace(result, facts=facts)
            return Answer("", result)
        except HarnessError as error:
            return Answer("", None, str(error))
        except Exception as error:
            return Answer("", None, one_line(error))

    def beat(self) -> bool:
        """A sign of life, beside what it does."""
        return True


def _as_others_run() -> str:
    """Takes back the niceness that Ray gives its processes, thread by thread as Linux has it; where that is
    not allowed, says so."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        for thread in Path("/proc/self/task").glob("[0-9]*") if niceness > 0 else ():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
    except OSError:
        return f"Ray runs it at niceness {niceness}: start its node with RAY_worker_niceness=0"
    return ""


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
    """address: as `join` takes it; types: only devices of these, if any are named; agent: has RayAgent's
    methods"""

    grows = True

    def __init__(self, address: str, types: Sequence[str] = (), agent: type[Any] = RayAgent) -> None:
        self.ray = join(address)
        self.head = Head(self.ray)
        self.types, self.agent = set(types), agent
        self.seats: dict[str, _Seat] = {}
        self.slots: dict[str, _Slot] = {}
        self.known: Sequence[Offer] = ()

    def offers(self) -> Sequence[Offer]:
        if not self.head.answers():
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
        if not self.head.answers():  # a call of Ray would wait for the head, and could end this process
            time.sleep(min(timeout_s, 0.2))
            return []
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

    def stop(self, device: str) -> None:
        if (seat := self.seats.pop(device, None)) is not None:
            with contextlib.suppress(Exception):  # the actor or the head may be gone already
                if self.head.answers():
                    self.ray.kill(seat.actor)

    def close(self) -> None:
        if not self.head.gone:
            for id in list(self.seats):
                self.stop(id)
        self.head.leave()


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
        offers = [Offer(f"{where}-gpu{i}", type, is_gpu=True) for i in range(gpus)]
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
