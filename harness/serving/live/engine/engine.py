"""Engine on loopback, from its start to the last of its processes."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, NothingRan
from harness.serving.live.engine.launch import EngineLaunch
from harness.serving.live.process.guarded import Guarded, how_it_ended

# Straight to loopback: a proxy from the environment has no business here.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EngineDied(HarnessError):
    """It ended while it was in use: one line with its last words."""


class Engine:
    """A serving engine as a guarded process. Raises NothingRan where it does not come up."""

    def __init__(self, launch: EngineLaunch, port: int, log: Path) -> None:
        self.launch, self.port = launch, port
        self.url = f"http://127.0.0.1:{port}"
        self.folder = log.parent
        self.process = Guarded(launch.command, launch.environment, log, self.folder)
        self.took_s: float | None = None

    def wait_healthy(self, deadline_s: float, tick: Callable[[float], None] = lambda s: None) -> None:
        """Until it answers and its model is the one we named. Raises NothingRan when it dies, is not there in
        time, or someone else answers on its port."""
        started = time.monotonic()
        while (passed := time.monotonic() - started) < deadline_s:
            if not self.process.alive():
                how = how_it_ended(self.process.code or 0)
                words = self.process.last_words()
                self.stop()
                raise NothingRan(f"the engine did not come up: it {how} after {passed:.0f} s; {words}")
            if self._get(self.launch.health, 2.0) is not None:
                self._is_ours()
                self.took_s = time.monotonic() - started
                return
            tick(passed)
            time.sleep(0.25)
        words = self.process.last_words()
        self.stop()
        raise NothingRan(
            f"the engine was not healthy after {deadline_s:g} s (longer: --start-timeout); {words}"
        )

    def check(self, doing: str = "") -> None:
        """Raises EngineDied where it has ended."""
        if not self.process.alive():
            how = how_it_ended(self.process.code or 0)
            raise EngineDied(f"the engine {how}{f' {doing}' if doing else ''}; {self.process.last_words()}")

    def _is_ours(self) -> None:
        answer = self._get("/v1/models", 10.0)
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            names = [model["id"] for model in json.loads(answer or "")["data"]]
            # A command given whole may have no {name}: then any answer is taken for its.
            if self.launch.model_name not in names and self.launch.kind in ("vllm", "sglang"):
                self.stop()
                raise NothingRan(
                    f"another server answers on port {self.port}: it serves {', '.join(names)[:80]}; "
                    "name another port with --port, or none"
                )

    def post(self, path: str, timeout_s: float = 120.0) -> bool:
        """Whether an order by POST (`/start_profile` ...) was taken."""
        request = urllib.request.Request(f"{self.url}{path}", data=b"", method="POST")
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def counter(self, name: str) -> float | None:
        """A counter or gauge of its Prometheus page, summed over labels; None where it has none."""
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in (self._get("/metrics", 5.0) or "").splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
        ]
        return sum(values) if values else None

    def notes(self) -> list[dict[str, Any]]:
        """What the plug-in noted so far."""
        if self.launch.swaps_log is None or not self.launch.swaps_log.exists():
            return []
        lines = []
        for line in self.launch.swaps_log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def pause(self) -> float:
        """When it stood still, by time.monotonic."""
        return self.process.pause()

    def resume(self) -> float:
        """When it went on, by time.monotonic."""
        return self.process.resume()

    def stop(self) -> None:
        """All its processes; sockets of theirs that nobody can answer any more go too."""
        self.process.end()
        with contextlib.suppress(OSError):  # the folder may be gone
            for left in self.folder.iterdir():
                if left.is_socket():
                    left.unlink()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _get(self, path: str, timeout_s: float) -> str | None:
        try:
            with _OPENER.open(f"{self.url}{path}", timeout=timeout_s) as answer:
                return answer.read().decode(errors="replace") if answer.status == 200 else None
        except (OSError, urllib.error.URLError, ValueError):
            return None
