"""Servers of the arms: as many up at once as memory holds, all but one stopped in their tracks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from harness.errors import HarnessError, NothingRan
from harness.serving.live.ab.arms import EngineArm
from harness.serving.live.client.client import Client, ClientFailed
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine import launch as launch_module
from harness.serving.live.engine.engine import Engine, EngineDied
from harness.serving.live.process.launching import free_port
from kernels.platform import available_memory

# Of what is free: servers grow while they serve, and the kernel ends one of them when all is used.
MEMORY_SHARE = 0.5
WARM_UP_TOKENS = 12  # of output, of each warming request
SWAP_NOT_CALLED = "the plug-in did not replace what the arm asks for"


class SwapFailed(HarnessError):
    """An arm whose op was not replaced: its numbers would be the other arm's."""


class Servers:
    """One engine for each arm, started when first asked for.

    load:     what they must have room for
    together: whether servers of other arms stay up, paused, where memory allows
    say:      takes a line of progress
    """

    def __init__(
        self,
        kind: launch_module.EngineKind,
        model: Path,
        folder: Path,
        client: Client,
        load: ClientLoad,
        *,
        port: int | None = None,
        flags: Sequence[str] = (),
        start_timeout_s: float = 600.0,
        together: bool = True,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.kind, self.model, self.folder, self.client, self.load = kind, model, folder, client, load
        self.port, self.flags, self.start_timeout_s = port, tuple(flags), start_timeout_s
        self.together, self.say = together and port is None, say
        self.up: dict[str, Engine] = {}
        self.largest = 0

    def get(self, arm: EngineArm) -> Engine:
        """The arm's engine, warmed up, alone awake. Raises NothingRan where it does not come up or
        cannot be warmed up, SwapFailed."""
        for name, other in self.up.items():
            if name != arm.name and not other.process.paused:
                other.pause()
        engine = self.up.pop(arm.name) if arm.name in self.up else None
        if engine is not None and not engine.process.alive():
            engine.stop()
            engine = None
        if engine is None:
            self._make_room()
            engine = self._start(arm)
        self.up[arm.name] = engine  # the last of them is the one used last
        if engine.process.paused:
            engine.resume()
        return engine

    def all(self, arms: Sequence[EngineArm]) -> list[Engine]:
        """The engines of all these arms, up together. Raises as `get` does, and NothingRan where memory does
        not hold them."""
        engines = [self.get(arm) for arm in arms]
        if any(arm.name not in self.up for arm in arms):
            raise NothingRan(
                f"memory does not hold the servers of {' and '.join(arm.name for arm in arms)} together, and "
                "they are to take turns: give no slices"
            )
        return engines

    def start(self, arm: EngineArm, trace: Path | None = None, routing: Path | None = None) -> Engine:
        """A further engine of that arm, which logs; the caller stops it. Raises as `get` does."""
        for engine in self.up.values():
            engine.pause()
        self._make_room()
        return self._start(arm, trace, routing)

    def rest(self) -> None:
        """Stops all in their tracks; the next call wakes the one that it is for."""
        for engine in self.up.values():
            if not engine.process.paused:
                engine.pause()

    def drop(self, arm: EngineArm) -> None:
        """Stops the arm's engine, if it is up."""
        if engine := self.up.pop(arm.name, None):
            engine.stop()

    def pids(self) -> list[int]:
        return [pid for engine in self.up.values() for pid in engine.process.pids()]

    def _make_room(self) -> None:
        """Ends servers, the one longest unused first, until one more fits."""
        free = available_memory() or 0
        while self.up and (not self.together or (free and self.largest > MEMORY_SHARE * free)):
            name = next(iter(self.up))
            self.say(f"ending the server of {name} to make room")
            self.up.pop(name).stop()
            free = available_memory() or 0

    def _start(self, arm: EngineArm, trace: Path | None = None, routing: Path | None = None) -> Engine:
        port = free_port(self.port)
        name = f"{arm.name}-{uuid.uuid4().hex[:8]}"
        folder = self.folder / "servers" / name
        folder.mkdir(parents=True, exist_ok=True)
        launch = launch_module.launch(
            self.kind,
            self.model,
            port,
            folder,
            name=name,
            load=self.load,
            environment=dict(arm.environment),
            flags=(*self.flags, *arm.flags),
            swaps=arm.swaps,
            trace=trace,
            routing=routing,
        )
        self.say(f"starting {self.kind.name} for {arm.name} on port {port}")
        engine = Engine(launch, port, folder / "server.log")
        try:
            engine.wait_healthy(self.start_timeout_s)
            self._warm_up(engine, folder)
            _require_swaps(engine, arm)
        except (ClientFailed, EngineDied) as error:
            engine.stop()
            raise NothingRan(f"{arm.name} could not be warmed up: {error}") from None
        except BaseException:
            engine.stop()
            raise
        self.largest = max(self.largest, engine.process.memory())
        self.say(f"{arm.name} is up after {engine.took_s:.0f} s, {engine.process.memory() / 2**30:.1f} GiB")
        return engine

    def _warm_up(self, engine: Engine, folder: Path) -> None:
        """As many requests as there will be at once, as long, but for few tokens of output. First calls of
        a shape are slow and so is the first use of memory (results/README.md, serving/cpu-default); swaps
        that make their weights in them have made them."""
        load = self.load
        together = min(load.concurrency, load.prompts)
        self.client.run(
            engine.url,
            engine.launch.model_name,
            ClientLoad(load.input_len, min(WARM_UP_TOKENS, load.output_len), together, together),
            seed=10**6,
            result=folder / "warm-up.json",
            deadline_s=self.start_timeout_s,
            watch=lambda: engine.check("while it was warmed up"),
        )

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.up:
            self.up.popitem()[1].stop()


def _require_swaps(engine: Engine, arm: EngineArm) -> None:
    until = time.monotonic() + 2.0
    while True:
        called = {note.get("swap") for note in engine.notes() if note["event"] == "called"}
        missing = [swap for swap in arm.swaps if swap not in called]
        if not missing:
            return
        if time.monotonic() > until:
            raise SwapFailed(
                f"arm {arm.name}: {missing[0]} was never called: {SWAP_NOT_CALLED} "
                f"(log: {engine.process.log})"
            )
        time.sleep(0.2)
