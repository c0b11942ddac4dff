"""The launches of an A/B in mirrored pairs, until there is a verdict or pairs or time run out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, NothingRan, UsageError
from harness.serving.ab.plan import METRICS, Command, client, launch, stop
from harness.serving.ab.record import Record
from harness.serving.ab.result import effects, looks, order, pair_seconds
from harness.serving.ab.server import Guarded, PortTaken, RunFailed, Server, held_port
from harness.serving.clients.load import load
from harness.serving.schema import ServingRun

REMAKES = 3  # how often a pair is made again; fixed before the first run, and never because of its times
PORTS = 5  # ports that a launch tries: a port taken by another process says nothing of the arm
LEAST_LIMIT_S = 300.0  # the least limit of a client's run; later it is three times the longest one
WARM_UP_SEEDS = 1_000_000  # distance of their seeds from those of measured runs
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Session:
    """budget_s: a pair is not begun if it would end later; say: takes a line of progress"""

    def __init__(self, record: Record, budget_s: float | None, say: Callable[[str], None]) -> None:
        self.plan, self.record, self.say = record.plan, record, say
        self.until = time.monotonic() + budget_s if budget_s else None

    def run(self) -> None:
        """Raises NothingRan if an arm does not come up in the first launch, which is not counted."""
        self.record.append("begun", boot=BOOT.read_text("utf-8").strip() if BOOT.exists() else "")
        most = looks(self.plan.pairs)[-1]
        for pair in range(most + 1):
            done = self.record.pairs()
            if pair in done:
                continue
            if pair:
                if self._decided(len(done) - 1):
                    return
                reach = time.monotonic() + pair_seconds(self.plan, self.record)
                if self.until is not None and reach > self.until:
                    self.say("the budget does not reach for another pair")
                    return
                self.say(f"pair {pair} of at most {most}: {', '.join(order(list(self.plan.arms), pair))}")
            if not self._made(pair):
                return

    def _decided(self, pairs: int) -> bool:
        """Whether no further pair is needed. This is asked only after the fixed numbers of pairs."""
        if pairs not in looks(self.plan.pairs)[:-1]:
            return False
        words = [effects(self.record, arm)[self.plan.metric].verdict for arm in self.plan.others]
        self.record.append("look", pairs=pairs, verdicts=words)
        self.say(f"looked at {pairs} pairs: {', '.join(words)}")
        return "unclear" not in words

    def _made(self, pair: int) -> bool:
        """Makes a pair. If one of its runs does not count, it makes the whole pair again."""
        first = 1 + max((e["attempt"] for e in self.record.of("launch", pair=pair)), default=-1)
        for attempt in range(first, first + REMAKES + 1):
            try:
                for arm in order(list(self.plan.arms), pair):
                    self._launched({"pair": pair, "attempt": attempt, "arm": arm})
                self.record.append("pair", pair=pair, attempt=attempt)
                return True
            except RunFailed as error:
                why = str(error)
            if not pair:
                raise NothingRan(f"{why}; nothing was measured")
            again = attempt < first + REMAKES
            self.say(
                f"pair {pair} is {'made again' if again else f'given up after {REMAKES + 1} attempts'}: {why}"
            )
        self.record.append("given up", pair=pair, reason=why)
        return False

    def _launched(self, about: dict[str, Any]) -> None:
        """Launches an arm, and launches it again if another process took the port meanwhile. Each launch has
        another port: a server hung that was started on the port of a killed one (sglang issue 22779)."""
        for left in reversed(range(PORTS)):
            number = len(self.record.of("launch"))
            first = self.plan.port + 10 * (number % 200)
            try:
                with held_port(first) as port:
                    if port != first:
                        self.say(f"  port {first} is taken by another process: {about['arm']} takes {port}")
                    self._launch(about, number, port)
                break
            except PortTaken as error:
                if not left:
                    raise
                self.say(f"  {error}: another port")

    def _launch(self, about: dict[str, Any], number: int, port: int) -> None:
        plan, record, arm = self.plan, self.record, about["arm"]
        name = re.sub(r"[^\w.-]", "-", f"ab-{record.folder.name}-{number}-{arm}")
        folder, cache = record.launch_folder(about), record.folder.absolute() / "cache" / arm
        for each in (folder, cache):
            each.mkdir(parents=True, exist_ok=True)
        record.append("launch", **about, number=number, port=port, name=name)
        started, ok = time.monotonic(), False
        command = launch(plan, arm, name, port, cache)
        ends = stop(plan, arm, name, port) if plan.stop else None
        try:
            log, guard = folder / "server.log", {"keep": record.lock, "grace": plan.stop_timeout}
            with Server(command, port, log, stop=ends, **guard) as server:
                limit = plan.ready_timeout if about["pair"] else plan.first_ready_timeout
                ready = server.wait_ready(plan.ready, limit)
                said = server.identity()
                (folder / "server.json").write_text(
                    json.dumps({"command": str(command), **said}, indent=1), "utf-8"
                )
                known = {key: said[key] for key in ("engine", "version", "owned")}
                record.append("ready", **about, seconds=round(ready, 1), **known)
                self._serve(server, folder, cache, about)
            ok = True
        except HarnessError as error:
            why, event = f"{arm}: {error}", "port taken" if isinstance(error, PortTaken) else "failed"
            record.append(event, **about, reason=why)
            kind = type(error) if isinstance(error, RunFailed) else NothingRan
            raise kind(why) from None
        finally:
            record.append("stopped", **about, seconds=round(time.monotonic() - started, 1), ok=ok)

    def _serve(self, server: Server, folder: Path, cache: Path, about: dict[str, Any]) -> None:
        """Warms the server up with other prompts, empties its prefix cache, and measures."""
        plan, arm, seed = self.plan, about["arm"], self.plan.seed + about["pair"]
        warm, result = folder / "warm-up.json", folder / "result.json"
        warming = client(plan, arm, server.port, seed + WARM_UP_SEEDS, warm, cache, warm_up=True)
        self._call(server, warming, folder / "warm-up.log")
        tries = 60 if plan.flush else 0
        while tries and server.get(plan.flush, post=True) is None:
            server.wait(0.5)  # requests that the client gave up may still be running
            if not (tries := tries - 1):
                raise RunFailed(f"POST {plan.flush} was not answered with 200 (flush)")
        began = time.monotonic()
        self._call(server, client(plan, arm, server.port, seed, result, cache), folder / "client.log")
        took = round(time.monotonic() - began, 1)
        if not result.is_file():
            raise RunFailed(f"the client wrote no {result}: put {{result}} where it takes its output file")
        run = counted(result, plan.asked)
        metrics = {name: run.value(*which) for name, which in METRICS.items()}
        if metrics[plan.metric] is None:
            raise RunFailed(f"{result} has no {plan.metric}: name a `metric` that the client measures")
        suspect = {
            f.rule: f.message.replace(f"{folder}/", "") for f in run.findings if f.severity == "suspect"
        }
        self.record.append("measured", **about, seed=seed, seconds=took, metrics=metrics, suspect=suspect,
                           output_tokens=run.totals.output_tokens)  # fmt: skip
        tpot, rate = metrics["tpot"], metrics["throughput"]
        shown = [f"TPOT {tpot:.2f} ms" if tpot else "", f"{rate:.0f} tok/s" if rate else ""]
        self.say(f"  {arm}: {', '.join(filter(None, shown)) or 'measured'}")

    def _call(self, server: Server, command: Command, log: Path) -> None:
        """Runs the client once. Raises RunFailed, which names the server if that died."""
        longest = max((e["seconds"] for e in self.record.of("measured")), default=0.0)
        limit = self.plan.client_timeout
        limit = min(limit, max(LEAST_LIMIT_S, 3 * longest)) if longest else limit
        until = time.monotonic() + limit
        with Guarded(command, log, keep=self.record.lock) as process:
            while process.wait(1.0) is None:
                server.check("while the client called it")
                if time.monotonic() > until:
                    raise RunFailed(
                        f"the client took over {limit:g} s (client_timeout); {process.last_words()}"
                    )
            server.check("while the client called it")
            if process.code:
                raise RunFailed(f"the client {process.how_it_ended()}; {process.last_words()}")


def counted(result: Path, asked: int | None) -> ServingRun:
    """The run in a client's file. Raises RunFailed if its numbers are wrong, or it is not one whole run."""
    try:
        runs = load(result)
    except UsageError as error:
        raise RunFailed(str(error)) from None
    if len(runs) > 1:
        raise RunFailed(f"{result} holds {len(runs)} runs: the client is to make one, at one concurrency")
    (run,) = runs
    if wrong := next((finding.message for finding in run.findings if finding.severity == "wrong"), ""):
        raise RunFailed(f"its numbers are wrong: {wrong}")
    asked, done = asked or run.workload.num_prompts, run.totals.completed
    lost = run.totals.failed or (asked - done if asked and done is not None else 0)
    if lost > 0:
        raise RunFailed(f"{lost} of {asked or lost + (done or 0)} requests failed ({result})")
    return run
