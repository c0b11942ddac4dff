"""Pairs of runs, made and judged: the loop of `serving run`."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.errors import HarnessError
from harness.machine.monitor.base import Monitor
from harness.serving.live.ab.arms import EngineArm
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.ab.rejection import RejectionRules
from harness.serving.live.ab.schedule import ScheduledRun, mirrored_runs
from harness.serving.live.ab.steps import steps
from harness.serving.live.client.client import Client
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine.servers import Servers
from harness.serving.live.engine.time_slices_run import BESIDE, ClientOutcome, run_in_time_slices

ATTEMPTS = 4  # at a run, before its pair is given up
CALIBRATION_SEED = 999_983


@dataclass(frozen=True)
class PairSettings:
    """What one series of pairs is: written to the journal before the first run.

    slice_s: runs of a pair are made at the same time, their engines in turn for so long; 0: one run after the
             other
    renew:   after so many pairs servers are started anew, so that the luck of one (where its memory lies) is
             not taken for its arm's; 0: never
    """

    arms: tuple[EngineArm, ...]
    load: ClientLoad
    pairs: int
    seed: int = 0
    rules: RejectionRules = field(default_factory=RejectionRules)
    attempts: int = ATTEMPTS
    run_timeout_s: float = 600.0
    slice_s: float = 0.0
    renew: int = 0

    def arm(self, name: str) -> EngineArm:
        return next(arm for arm in self.arms if arm.name == name)

    def facts(self) -> dict[str, Any]:
        """As a journal's plan has them."""
        return {
            "arms": [arm.facts() for arm in self.arms],
            "load": self.load.facts(),
            "pairs": self.pairs,
            "seed": self.seed,
            "slice_s": self.slice_s,
            "renew": self.renew,
            "rules": self.rules.facts(),
        }


class PairSession:
    """Makes the pairs that the journal lacks. A run that is rejected is made again at once, with the same
    seed, so that a pair's runs stay neighbours."""

    def __init__(
        self,
        settings: PairSettings,
        servers: Servers,
        client: Client,
        journal: LiveJournal,
        monitor: Monitor,
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.settings, self.servers, self.client = settings, servers, client
        self.journal, self.monitor, self.say = journal, monitor, say

    def run(self) -> None:
        """Raises NothingRan where an engine does not come up, EngineDied where one dies twice over."""
        rules = self._calibrated()
        done = {line["pair"] for line in self.journal.of("pair")}
        for pair in mirrored_runs(
            [arm.name for arm in self.settings.arms], self.settings.pairs, self.settings.seed
        ):
            if pair[0].pair in done:
                continue
            if self.settings.renew and pair[0].pair % self.settings.renew == 0:
                for arm in self.settings.arms:
                    self.servers.drop(arm)
            self._pair(pair, rules)

    def _calibrated(self) -> RejectionRules:
        """The rules, with the prefill pattern that a run of the first arm shows where none was given. It is
        on the disk before the first run that counts."""
        rules = self.settings.rules
        if rules.pattern or rules.any_pattern or len(self.settings.arms) < 2 or not self.settings.pairs:
            return rules
        before = self.journal.of("calibration")
        if not before:
            arm = self.settings.arms[0]
            turn = ScheduledRun(-1, arm.name, CALIBRATION_SEED)
            record = self._run([turn], 0, replace(rules, disturbed=False))[0]
            if record["status"] == "failed":
                raise HarnessError(f"the first run failed: {'; '.join(record['reasons'])}")
            self.journal.append("calibration", record)
            before = [record]
        return replace(rules, pattern=tuple(before[-1]["prefill_pattern"]))

    def _pair(self, pair: Sequence[ScheduledRun], rules: RejectionRules) -> None:
        """A pair that an earlier call left unfinished begins anew: its runs would be no neighbours."""
        kept: dict[str, int] = {}
        for group in [pair] if self.settings.slice_s else [[turn] for turn in pair]:
            arms = {turn.arm for turn in group}
            runs = self.journal.of("run")
            earlier = [run["attempt"] for run in runs if run["pair"] == group[0].pair and run["arm"] in arms]
            first = 1 + max(earlier, default=-1)
            for attempt in range(first, first + self.settings.attempts):
                records = self._run(group, attempt, rules)
                for record in records:
                    self.journal.append("run", record)
                    self._report(record)
                bad = [record for record in records if record["status"] != "ok"]
                if not bad:
                    kept |= dict.fromkeys(arms, attempt)
                    break
            else:
                facts = {key: bad[0][key] for key in ("pair", "arm", "reasons")}
                self.journal.append("given_up", facts)
                return
        self.journal.append("pair", {"pair": pair[0].pair, "attempts": kept})

    def _run(
        self, group: Sequence[ScheduledRun], attempt: int, rules: RejectionRules
    ) -> list[dict[str, Any]]:
        """Runs made at the same time, as records; `failed` where engine or client did, `rejected` where a
        rule says so."""
        arms, settings = [self.settings.arm(turn.arm) for turn in group], self.settings
        engines = self.servers.all(arms)
        pair, seed = group[0].pair, group[0].seed
        label = "calibration" if pair < 0 else f"pair-{pair:03d}-{attempt}"
        results = [self.journal.folder / "runs" / f"{label}-{arm.name}.json" for arm in arms]
        results[0].parent.mkdir(exist_ok=True)
        started = _now()
        loaded, disturbance = run_in_time_slices(
            self.client,
            engines,
            results,
            settings.load,
            seed,
            slice_s=settings.slice_s,
            timeout_s=settings.run_timeout_s,
            monitor=self.monitor,
        )
        records = []
        for arm, result, outcome in zip(arms, results, loaded, strict=True):
            record = {
                "pair": pair,
                "arm": arm.name,
                "seed": seed,
                "attempt": attempt,
                "result": str(result.relative_to(self.journal.folder)),
                "started": started,
                "ended": _now(),
            }
            if outcome.error and str(outcome.error) != BESIDE:
                self.servers.drop(arm)
            records.append(record | self._judged(outcome, rules, disturbance))
        return records

    def _judged(self, outcome: ClientOutcome, rules: RejectionRules, disturbance: str) -> dict[str, Any]:
        load = self.settings.load
        if outcome.times is None:
            return {"status": "failed", "reasons": [str(outcome.error)]}
        times = outcome.times
        seen = steps(times.requests, min(load.concurrency, load.prompts), times.input_lens, outcome.until)
        reasons = rules.reasons(load, len(times.requests), times.output_lens, seen, disturbance)
        return {
            "status": "rejected" if reasons else "ok",
            "reasons": reasons,
            "disturbance": disturbance,
            "conditions": self.monitor.conditions(),
            **times.means(),
            **seen.facts(),
            **({"stood_still": outcome.clock.stops} if outcome.clock.stops else {}),
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
