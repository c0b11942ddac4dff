"""Pairs of runs, made and judged: the loop of `serving run`."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.disturbance import Monitor
from harness.errors import HarnessError
from harness.serving.live.arms import Arm
from harness.serving.live.client import Client, ClientFailed
from harness.serving.live.details import details
from harness.serving.live.engine import EngineDied
from harness.serving.live.journal import Journal
from harness.serving.live.load import Load
from harness.serving.live.order import Turn, turns
from harness.serving.live.rules import Rules
from harness.serving.live.servers import Servers
from harness.serving.live.steps import steps

ATTEMPTS = 4  # at a run, before its pair is given up
CALIBRATION_SEED = 999_983


@dataclass(frozen=True)
class Settings:
    """What one series of pairs is: written to the journal before the first run."""

    arms: tuple[Arm, ...]
    load: Load
    pairs: int
    seed: int = 0
    rules: Rules = field(default_factory=Rules)
    attempts: int = ATTEMPTS
    run_timeout_s: float = 600.0

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


class Session:
    """Makes the pairs that the journal lacks. A run that is rejected is made again at once, with the same
    seed, so that a pair's runs stay neighbours."""

    def __init__(
        self,
        settings: Settings,
        servers: Servers,
        client: Client,
        journal: Journal,
        monitor: Monitor,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.settings, self.servers, self.client = settings, servers, client
        self.journal, self.monitor, self.say = journal, monitor, say

    def run(self) -> None:
        """Raises NothingRan where an engine does not come up, EngineDied where one dies twice over."""
        rules = self._calibrated()
        done = {line["pair"] for line in self.journal.of("pair")}
        for pair in turns([arm.name for arm in self.settings.arms], self.settings.pairs, self.settings.seed):
            if pair[0].pair not in done:
                self._pair(pair, rules)

    def _calibrated(self) -> Rules:
        """The rules, with the prefill pattern that a run of the first arm shows where none was given. It is
        on the disk before the first run that counts."""
        rules = self.settings.rules
        if rules.pattern or rules.any_pattern or len(self.settings.arms) < 2:
            return rules
        before = self.journal.of("calibration")
        if not before:
            arm = self.settings.arms[0]
            record = self._run(Turn(-1, arm.name, CALIBRATION_SEED), 0, replace(rules, disturbed=False))
            if record["status"] == "failed":
                raise HarnessError(f"the first run failed: {'; '.join(record['reasons'])}")
            self.journal.append("calibration", record)
            before = [record]
        return replace(rules, pattern=tuple(before[-1]["prefill_pattern"]))

    def _pair(self, pair: Sequence[Turn], rules: Rules) -> None:
        """A pair that an earlier call left unfinished begins anew: its runs would be no neighbours."""
        kept: dict[str, int] = {}
        for turn in pair:
            earlier = [r for r in self.journal.of("run") if (r["pair"], r["arm"]) == (turn.pair, turn.arm)]
            first = 1 + max((run["attempt"] for run in earlier), default=-1)
            for attempt in range(first, first + self.settings.attempts):
                record = self._run(turn, attempt, rules)
                self.journal.append("run", record)
                self._report(record)
                if record["status"] == "ok":
                    kept[turn.arm] = attempt
                    break
            else:
                facts = {"pair": turn.pair, "arm": turn.arm, "reasons": record["reasons"]}
                self.journal.append("given_up", facts)
                return
        self.journal.append("pair", {"pair": pair[0].pair, "attempts": kept})

    def _run(self, turn: Turn, attempt: int, rules: Rules) -> dict[str, Any]:
        """One run as a record; `failed` where engine or client did, `rejected` where a rule says so."""
        arm, load = self.settings.arm(turn.arm), self.settings.load
        engine = self.servers.get(arm)
        label = "calibration" if turn.pair < 0 else f"pair-{turn.pair:03d}-{attempt}"
        result = self.journal.folder / "runs" / f"{label}-{arm.name}.json"
        result.parent.mkdir(exist_ok=True)
        record: dict[str, Any] = {
            "pair": turn.pair,
            "arm": turn.arm,
            "seed": turn.seed,
            "attempt": attempt,
            "result": str(result.relative_to(self.journal.folder)),
            "started": _now(),
        }
        disturbances: list[str] = []
        self.monitor.begin()
        try:
            self.client.run(
                engine.url,
                engine.launch.model_name,
                load,
                turn.seed,
                result,
                self.settings.run_timeout_s,
                watch=lambda: engine.check("during a run"),
                ended=lambda: disturbances.append(self.monitor.end()),
            )
        except (ClientFailed, EngineDied) as error:
            self.servers.drop(arm)
            return record | {"status": "failed", "ended": _now(), "reasons": [str(error)]}
        disturbance = "; ".join(filter(None, disturbances))
        found = details(result)
        seen = steps(found.requests, min(load.concurrency, load.prompts), found.input_lens)
        reasons = rules.reasons(load, len(found.requests), found.output_lens, seen, disturbance)
        return record | {
            "status": "rejected" if reasons else "ok",
            "ended": _now(),
            "reasons": reasons,
            "disturbance": disturbance,
            "conditions": self.monitor.conditions(),
            **found.means(),
            **seen.facts(),
        }

    def _report(self, record: dict[str, Any]) -> None:
        itl = record.get("steady_itl_ms")
        shown = f"steady ITL {itl:.2f} ms" if itl else "no steady steps"
        verdict = (
            record["status"] if record["status"] == "ok" else f"{record['status']}: {record['reasons'][0]}"
        )
        self.say(f"pair {record['pair']}, {record['arm']}: {shown}, {verdict}")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
