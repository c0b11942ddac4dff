"""The launches of an A/B in mirrored pairs, until there is a verdict or pairs or time run out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, NothingRan, UsageError
from harness.serving.ab.effect import looks
from harness.serving.ab.plan import METRICS, Command, client_command, launch_command, stop_command
from harness.serving.ab.record import Record, pair_seconds
from harness.serving.ab.result import effects
from harness.serving.ab.server import Guarded, PortTaken, RunFailed, Server, held_port
from harness.serving.clients.load import load
from harness.serving.schema import ServingRun

REMAKES = 3  # how often a pair is made again; fixed before the first run, and never because of its times
PORTS = 5  # ports that a launch tries: a port taken by another process says nothing of the arm
LEAST_LIMIT_S = 300.0  # the least limit of a client's run; later it is three times the longest one
WARM_UP_SEEDS = 1_000_000  # distance of their seeds from those of measured runs
FLUSHES = 60  # requests to empty the prefix cache, half a second apart
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Session:
    """The launches of one command. Pair 0 is launched like the others, and not counted.
    budget_s: a pair is not begun if it would end later; say: takes a line of progress"""

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
            if pair > 0:
                if self._is_decided(len(done) - 1):
                    return
                end = time.monotonic() + pair_seconds(self.plan, self.record)
                if self.until is not None and end > self.until:
                    self.say("the budget does not reach for another pair")
                    return
                self.say(f"pair {pair} of at most {most}: {', '.join(self.plan.order(pair))}")
            if not self._make(pair):
                return

    def _is_decided(self, pairs: int) -> bool:
        """Whether all arms have a verdict. Verdicts are only made after the fixed numbers of pairs."""
        if pairs not in looks(self.plan.pairs):
            return False
        verdicts = [effects(self.record, arm)[self.plan.metric].verdict for arm in self.plan.others]
        self.record.append("look", pairs=pairs, verdicts=verdicts)
        self.say(f"looked at {pairs} pairs: {', '.join(verdicts)}")
        return "unclear" not in verdicts

    def _make(self, pair: int) -> bool:
        """Makes a pair, again and as a whole while one of its runs does not count. False: it is given up."""
        attempts = [event["attempt"] for event in self.record.of("launch", pair=pair)]
        first = max(attempts, default=-1) + 1
        for attempt in range(first, first + REMAKES + 1):
            try:
                for arm in self.plan.order(pair):
                    self._launch_on_free_port({"pair": pair, "attempt": attempt, "arm": arm})
                self.record.append("pair", pair=pair, attempt=attempt)
                return True
            except RunFailed as error:
                why = str(error)
            if pair == 0:
                raise NothingRan(f"{why}; nothing was measured")
            is_last = attempt == first + REMAKES
            next_step = f"given up after {REMAKES + 1} attempts" if is_last else "made again"
            self.say(f"pair {pair} is {next_step}: {why}")
        self.record.append("given up", pair=pair, reason=why)
        return False

    def _launch_on_free_port(self, launch: dict[str, Any]) -> None:
        """Launches an arm, and launches it again if another process took the port meanwhile. Each launch has
        another port: a server hung that was started on the port of a killed one (sglang issue 22779).
        launch: its pair, attempt and arm"""
        for left in reversed(range(PORTS)):  # attempts after this one
            number = len(self.record.of("launch"))
            first = self.plan.port + 10 * (number % 200)
            try:
                with held_port(first) as port:
                    if port != first:
                        self.say(f"  port {first} is taken by another process: {launch['arm']} takes {port}")
                    self._launch(launch, number, port)
                break
            except PortTaken as error:
                if not left:
                    raise
                self.say(f"  {error}: another port")

    def _launch(self, launch: dict[str, Any], number: int, port: int) -> None:
        plan, record, arm = self.plan, self.record, launch["arm"]
        name = re.sub(r"[^\w.-]", "-", f"ab-{record.folder.name}-{number}-{arm}")
        folder, cache = record.launch_folder(launch), record.folder.absolute() / "cache" / arm
        folder.mkdir(parents=True, exist_ok=True)
        cache.mkdir(parents=True, exist_ok=True)
        record.append("launch", **launch, number=number, port=port, name=name)
        started, ok = time.monotonic(), False
        command = launch_command(plan, arm, name, port, cache)
        stop = stop_command(plan, arm, name, port) if plan.stop else None
        log, grace = folder / "server.log", plan.stop_timeout
        try:
            with Server(command, port, log, keep=record.lock, grace=grace, stop=stop) as server:
                limit_s = plan.ready_timeout if launch["pair"] > 0 else plan.first_ready_timeout
                ready_s = server.wait_ready(plan.ready, limit_s)
                identity = server.identity()
                document = {"command": str(command), **identity}
                (folder / "server.json").write_text(json.dumps(document, indent=1), "utf-8")
                facts = {key: identity[key] for key in ("engine", "version", "owned")}
                record.append("ready", **launch, seconds=round(ready_s, 1), **facts)
                self._serve(server, folder, cache, launch)
            ok = True
        except HarnessError as error:
            reason = f"{arm}: {error}"
            record.append("port taken" if isinstance(error, PortTaken) else "failed", **launch, reason=reason)
            # After a RunFailed the pair is made again; any other error ends the A/B.
            kind = type(error) if isinstance(error, RunFailed) else NothingRan
            raise kind(reason) from None
        finally:
            record.append("stopped", **launch, seconds=round(time.monotonic() - started, 1), ok=ok)

    def _serve(self, server: Server, folder: Path, cache: Path, launch: dict[str, Any]) -> None:
        """Warms the server up with other prompts, empties its prefix cache, and measures."""
        plan, arm, seed = self.plan, launch["arm"], self.plan.seed + launch["pair"]
        warm, result = folder / "warm-up.json", folder / "result.json"
        warming = client_command(plan.for_warm_up(), arm, server.port, seed + WARM_UP_SEEDS, warm, cache)
        self._call(server, warming, folder / "warm-up.log")
        if plan.flush:
            self._flush(server)
        began = time.monotonic()
        measuring = client_command(plan, arm, server.port, seed, result, cache)
        self._call(server, measuring, folder / "client.log")
        seconds = round(time.monotonic() - began, 1)
        if not result.is_file():
            raise RunFailed(f"the client wrote no {result}: put {{result}} where it takes its output file")
        run = whole_run(result, plan.prompts_asked)
        metrics = {name: run.value(*metric) for name, metric in METRICS.items()}
        if metrics[plan.metric] is None:
            raise RunFailed(f"{result} has no {plan.metric}: name a `metric` that the client measures")
        suspect = [finding for finding in run.findings if finding.severity == "suspect"]
        facts: dict[str, Any] = {"seed": seed, "seconds": seconds, "metrics": metrics}
        facts["suspect"] = {item.rule: item.message.replace(f"{folder}/", "") for item in suspect}
        self.record.append("measured", **launch, **facts, output_tokens=run.totals.output_tokens)
        texts = [f"TPOT {metrics['tpot']:.2f} ms"] if metrics["tpot"] else []
        texts += [f"{metrics['throughput']:.0f} tok/s"] if metrics["throughput"] else []
        self.say(f"  {arm}: {', '.join(texts) or 'measured'}")

    def _flush(self, server: Server) -> None:
        """Empties the server's prefix cache. Raises RunFailed if it does not answer with 200."""
        for _ in range(FLUSHES):
            if server.get(self.plan.flush, post=True) is not None:
                return
            server.wait(0.5)  # requests that the client gave up may still be running
        raise RunFailed(f"POST {self.plan.flush} was not answered with 200 (flush)")

    def _call(self, server: Server, command: Command, log: Path) -> None:
        """Runs the client once. Raises RunFailed, which names the server if that died."""
        limit_s = self.plan.client_timeout
        if earlier := self.record.of("measured"):
            longest_s = max(event["seconds"] for event in earlier)
            limit_s = min(limit_s, max(LEAST_LIMIT_S, 3 * longest_s))
        until = time.monotonic() + limit_s
        with Guarded(command, log, keep=self.record.lock) as process:
            while process.wait(1.0) is None:
                server.check("while the client called it")
                if time.monotonic() > until:
                    words = process.last_words()
                    raise RunFailed(f"the client took over {limit_s:g} s (client_timeout); {words}")
            server.check("while the client called it")
            if process.code:
                raise RunFailed(f"the client {process.how_it_ended()}; {process.last_words()}")


def whole_run(result: Path, asked: int | None) -> ServingRun:
    """The run in a client's file. Raises RunFailed if its numbers are wrong, or it is not one whole run.
    asked: the number of requests that the plan's client was asked for; None: not said"""
    try:
        runs = load(result)
    except UsageError as error:
        raise RunFailed(str(error)) from None
    if len(runs) > 1:
        raise RunFailed(f"{result} holds {len(runs)} runs: the client is to make one, at one concurrency")
    (run,) = runs
    for finding in run.findings:
        if finding.severity == "wrong":
            raise RunFailed(f"its numbers are wrong: {finding.message}")
    sent, completed = asked or run.workload.num_prompts, run.totals.completed
    lost = run.totals.failed or 0
    if not lost and sent and completed is not None:
        lost = sent - completed
    if lost > 0:
        raise RunFailed(f"{lost} of {sent or lost + (completed or 0)} requests failed ({result})")
    return run
