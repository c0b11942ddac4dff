"""Pairs of runs of a live engine, from the options of `serving run` to a journal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import UsageError
from harness.serving.live.ab.arms import parse_arms
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.ab.rejection import RejectionRules
from harness.serving.live.ab.session import PairSettings
from harness.serving.live.checkpoint.directory import check_model, default_model
from harness.serving.live.client.client import require_client
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine.time_slices import require_cpu
from harness.serving.live.live_engine import (
    LiveEngine,
    LiveSetup,
    disk_failure_is_one_line,
    live_engine,
    require_disk,
)
from harness.serving.live.process.launching import free_port, termination_is_an_interrupt
from kernels.platform import detect, version


@dataclass(frozen=True)
class RunRequest:
    """The command's options as given."""

    model: str
    engine: str
    client: str
    arms: tuple[str, ...]
    flags: tuple[str, ...]
    load: ClientLoad
    pairs: int
    seed: int
    out: str
    resume: bool
    trace: bool
    routing_log: bool
    prefill_pattern: str
    slice_s: float
    renew: int
    keep_disturbed: bool
    one_at_a_time: bool
    port: int | None
    start_timeout: float
    run_timeout: float

    def settings(self) -> PairSettings:
        """Raises UsageError."""
        return PairSettings(
            tuple(parse_arms(self.arms)),
            self.load,
            self.pairs,
            self.seed,
            self._rules(),
            run_timeout_s=self.run_timeout,
            slice_s=self.slice_s,
            renew=self.renew,
        )

    def setup(self, say: Callable[[str], None]) -> LiveSetup:
        """Makes the default model where there is none yet. Raises UsageError, NothingRan."""
        if self.slice_s:
            require_cpu(detect())
            if self.one_at_a_time or self.port is not None:
                raise UsageError(
                    "--slice needs all servers up, each on a port of its own: not with --port, "
                    "--one-at-a-time"
                )
        client = self.client or (self.engine if self.engine in ("vllm", "sglang") else "vllm")
        setup = LiveSetup(
            self.engine,
            client,
            Path(self.model),
            Path(self.out).absolute(),
            self.load,
            self.flags,
            self.port,
            self.start_timeout,
            self.run_timeout,
            together=not self.one_at_a_time,
        )
        _ = setup.kind
        if self.port is not None:
            free_port(self.port)
        require_client(client)
        require_disk(setup.folder)
        model = default_model(say=say) if self.model == "default" else Path(self.model)
        check_model(model)
        return replace(setup, model=model.resolve())

    def _rules(self) -> RejectionRules:
        text = self.prefill_pattern
        try:
            pattern = tuple(int(part) for part in text.split("+")) if text not in ("", "any") else ()
        except ValueError:
            raise UsageError(
                f"cannot read --prefill-pattern {text!r}: write how many are prefilled together, as 1+3, "
                "or any"
            ) from None
        return RejectionRules(pattern, text == "any", disturbed=not self.keep_disturbed)


def run_pairs(request: RunRequest, say: Callable[[str], None]) -> LiveJournal:
    """Makes the pairs of runs that the journal lacks. Raises HarnessError."""
    settings = request.settings()
    setup = request.setup(say)
    kind = setup.kind
    plan = setup.plan(
        settings,
        model=setup.model.name if request.model == "default" else str(Path(request.model)),
        engine_version=version(kind.module) if kind.module else None,
    )
    journal = LiveJournal.begin(setup.folder, plan, request.resume)
    with (
        termination_is_an_interrupt(),
        disk_failure_is_one_line(setup.folder),
        live_engine(setup, say) as engine,
    ):
        if request.trace or request.routing_log:
            _observe(request, engine, settings, journal)
        monitor = engine.monitor(detect())
        for line in monitor.before():
            say(f"warning: {line}")
        engine.pairs(settings, journal, monitor)
    return journal


def _observe(request: RunRequest, engine: LiveEngine, settings: PairSettings, journal: LiveJournal) -> None:
    """The trace and the routing log of each arm that has none yet."""
    folder = journal.folder

    def inside(file: Path | None) -> str | None:
        return str(file.relative_to(folder)) if file else None

    for arm in settings.arms:
        if any(line["arm"] == arm.name for line in journal.of("observed")):
            continue
        files = engine.observe(
            arm,
            folder / "observed" / arm.name,
            trace=request.trace,
            routing=request.routing_log,
            seed=request.seed,
        )
        journal.append(
            "observed",
            {
                "arm": arm.name,
                "trace": inside(files.trace),
                "routing": inside(files.routing),
                "result": inside(files.result),
            },
        )
        engine.say(f"observed {arm.name}: {files.trace or ''} {files.routing or ''}")
