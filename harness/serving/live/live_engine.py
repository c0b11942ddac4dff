"""A live engine under load: its servers and its client, opened and stopped together."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from harness.errors import HarnessError, NothingRan
from harness.machine.monitor import monitor_for
from harness.machine.monitor.base import Monitor
from harness.machine.provenance import surroundings
from harness.serving.live.ab.arms import EngineArm
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.ab.session import PairSession, PairSettings
from harness.serving.live.client.client import Client
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine import launch
from harness.serving.live.engine.observe import ObservationFiles, observe
from harness.serving.live.engine.servers import Servers
from kernels.platform import Platform

Say = Callable[[str], None]
LEAST_DISK = 256 << 20  # bytes: results, logs and a trace


@dataclass(frozen=True)
class LiveSetup:
    """What is served and what loads it, alike for all arms.

    engine:   a name, or a command (see engine/launch.py); client likewise (see client/client.py)
    model:    its directory; folder: journal, results and logs
    together: whether servers of several arms stay up, where memory allows
    """

    engine: str
    client: str
    model: Path
    folder: Path
    load: ClientLoad
    flags: tuple[str, ...] = ()
    port: int | None = None
    start_timeout_s: float = 600.0
    run_timeout_s: float = 600.0
    together: bool = True

    @property
    def kind(self) -> launch.EngineKind:
        """Raises UsageError, NothingRan where it is not installed."""
        return launch.kind_for(self.engine)

    def plan(self, settings: PairSettings, **more: JsonValue) -> dict[str, JsonValue]:
        """What a series of pairs is, for the journal; --resume asks for the same."""
        return {
            "schema": 1,
            "model": self.model.name,
            "engine": self.engine,
            "client": self.client,
            "flags": list(self.flags),
            **settings.facts(),
            **surroundings(),
            **more,
        }


class LiveEngine:
    """Servers, which start when they are first asked for, and the client that loads them."""

    def __init__(self, setup: LiveSetup, client: Client, servers: Servers, say: Say) -> None:
        self.setup, self.client, self.servers, self.say = setup, client, servers, say

    def observe(
        self, arm: EngineArm, folder: Path, *, trace: bool, routing: bool, seed: int
    ) -> ObservationFiles:
        """A kernel trace and a routing log of one run, which does not count. Raises HarnessError."""
        return observe(
            self.servers,
            self.client,
            arm,
            self.setup.load,
            folder,
            trace=trace,
            routing=routing,
            seed=seed,
            run_timeout_s=self.setup.run_timeout_s,
        )

    def load(self, arm: EngineArm, seed: int, result: Path) -> None:
        """One run of an arm, which does not count; its result is then in the file. Raises HarnessError."""
        engine = self.servers.get(arm)
        self.client.run(
            engine.url,
            engine.launch.model_name,
            self.setup.load,
            seed=seed,
            result=result,
            deadline_s=self.setup.run_timeout_s,
            watch=lambda: engine.check("while it was looked into"),
        )

    def monitor(self, platform: Platform) -> Monitor:
        """What disturbs the engine and its client on that device."""
        return monitor_for(platform, lambda: [*self.servers.pids(), *self.client.pids()])

    def pairs(self, settings: PairSettings, journal: LiveJournal, monitor: Monitor) -> None:
        """Makes the pairs that the journal lacks. Raises HarnessError."""
        PairSession(settings, self.servers, self.client, journal, monitor, say=self.say).run()


@contextlib.contextmanager
def live_engine(setup: LiveSetup, say: Say) -> Iterator[LiveEngine]:
    """Servers and client; all their processes are ended when this ends, however it does."""
    with (
        Client(setup.client, setup.engine, setup.model, setup.folder) as client,
        Servers(
            setup.kind,
            setup.model,
            setup.folder,
            client,
            setup.load,
            port=setup.port,
            flags=setup.flags,
            start_timeout_s=setup.start_timeout_s,
            together=setup.together,
            say=say,
        ) as servers,
    ):
        yield LiveEngine(setup, client, servers, say)


def require_disk(folder: Path) -> None:
    """Raises NothingRan where too little is free for results, logs and a trace."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < LEAST_DISK:
        raise NothingRan(
            f"{free >> 20} MiB are free in {place}, {LEAST_DISK >> 20} MiB are needed: choose another --out"
        )


@contextlib.contextmanager
def disk_failure_is_one_line(folder: Path) -> Iterator[None]:
    """An OSError within becomes a HarnessError that says what stays."""
    try:
        yield
    except OSError as error:
        raise HarnessError(
            f"cannot write to {error.filename or folder}: {error.strerror}; what is finished stays in "
            f"{folder}, --resume goes on"
        ) from None
