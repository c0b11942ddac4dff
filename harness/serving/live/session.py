"""Pairs of runs, made and judged: the loop of `serving run`."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.disturbance import Monitor
from harness.errors import HarnessError
from harness.serving.live.arms import Arm
from harness.serving.live.client import Client, ClientFailed
from harness.serving.live.effect import Effect, effect
from harness.serving.live.engine import EngineDied
from harness.serving.live.journal import Journal
from harness.serving.live.load import Load
from harness.serving.live.order import Turn, turns
from harness.serving.live.rules import Rules
from harness.serving.live.servers import Servers
from harness.serving.live.steps import requests, steps

ATTEMPTS = 3  # of a pair, before it is given up
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
    """Makes the pairs that the journal lacks. A pair of which a run is rejected is made again as a whole,
    with the same seed, so that its runs stay neighbours."""

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
        if rules.pattern or len(self.settings.arms) < 2:
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
        earlier = [line for line in self.journal.of("run") if line["pair"] == pair[0].pair]
        first = 1 + max((line["attempt"] for line in earlier), default=-1)
        reasons: list[str] = []
        for attempt in range(first, max(first + 1, self.settings.attempts)):
            reasons = []
            for turn in pair:
                record = self._run(turn, attempt, rules)
                self.journal.append("run", record)
                self._report(record)
                if record["status"] != "ok":
                    reasons = record["reasons"]
                    break
            if not reasons:
                self.journal.append("pair", {"pair": pair[0].pair, "attempt": attempt})
                return
        self.journal.append("given_up", {"pair": pair[0].pair, "reasons": reasons})

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
            )
        except (ClientFailed, EngineDied) as error:
            self.servers.drop(arm)
            return record | {"status": "failed", "ended": _now(), "reasons": [str(error)]}
        disturbance = self.monitor.end()
        found, lens = requests(result)
        seen = steps(found, min(load.concurrency, load.prompts), lens)
        tokens = output_tokens(result)
        reasons = rules.reasons(load, len(found), tokens, seen, disturbance)
        return record | {
            "status": "rejected" if reasons else "ok",
            "ended": _now(),
            "reasons": reasons,
            "disturbance": disturbance,
            "conditions": self.monitor.conditions(),
            **means(result),
            **seen.facts(),
        }

    def _report(self, record: dict[str, Any]) -> None:
        itl = record.get("steady_itl_ms")
        shown = f"steady ITL {itl:.2f} ms" if itl else "no steady steps"
        verdict = (
            record["status"] if record["status"] == "ok" else f"{record['status']}: {record['reasons'][0]}"
        )
        self.say(f"pair {record['pair']}, {record['arm']}: {shown}, {verdict}")


QUANTITIES = {
    "steady_itl_ms": "decode step (steady ITL)",
    "steady_itl_median_ms": "its median",
    "mean_ttft_ms": "mean TTFT",
    "mean_tpot_ms": "mean TPOT",
    "prefill_1_ms": "first prefill",
    "prefill_2_ms": "second prefill",
}


def pairs_of(
    lines: Sequence[dict[str, Any]], quantity: str, base: str, arm: str
) -> list[tuple[float, float]]:
    """(base, arm) of each finished pair, in order."""
    kept = {line["pair"]: line["attempt"] for line in lines if line["kind"] == "pair"}
    values = {
        (line["pair"], line["arm"]): line.get(quantity)
        for line in lines
        if line["kind"] == "run" and kept.get(line["pair"]) == line["attempt"]
    }
    both = [(values.get((pair, base)), values.get((pair, arm))) for pair in sorted(kept)]
    return [(a, b) for a, b in both if a is not None and b is not None]


def effects(lines: Sequence[dict[str, Any]], base: str, arm: str) -> dict[str, Effect]:
    """What `arm` changes against `base`, by quantity."""
    found = {}
    for quantity in QUANTITIES:
        both = pairs_of(lines, quantity, base, arm)
        if one := effect([a for a, _ in both], [b for _, b in both]):
            found[quantity] = one
    return found


def spread(lines: Sequence[dict[str, Any]], arm: str, quantity: str = "steady_itl_ms") -> float | None:
    """Relative standard deviation between an arm's finished runs; None for fewer than two."""
    values = [a for a, _ in pairs_of(lines, quantity, arm, arm)]
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else None


def means(result: Path) -> dict[str, float]:
    """Of all requests, in ms, from each one's times: TTFT, TPOT (after the first token) and E2E. From the detail and not from the client's own means, so that all clients count alike."""
    found, _ = requests(result)
    if not found:
        return {}
    many = [r for r in found if len(r.tokens) > 1]
    return {
        "mean_ttft_ms": 1e3 * statistics.fmean(r.tokens[0] - r.sent for r in found),
        "mean_e2e_ms": 1e3 * statistics.fmean(r.tokens[-1] - r.sent for r in found),
        "duration_s": max(r.tokens[-1] for r in found) - min(r.sent for r in found),
    } | (
        {
            "mean_tpot_ms": 1e3
            * statistics.fmean((r.tokens[-1] - r.tokens[0]) / (len(r.tokens) - 1) for r in many)
        }
        if many
        else {}
    )


def output_tokens(result: Path) -> list[int]:
    """Of each request, as the client counted them; empty where it did not."""
    try:
        lines = result.read_text().strip().splitlines()
        content = json.loads("\n".join(lines)) if lines[0].strip() == "{" else json.loads(lines[-1])
        return [int(n) for n in content.get("output_lens") or []]
    except (OSError, ValueError, IndexError, AttributeError, TypeError):
        return []


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
