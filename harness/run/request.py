"""The request of a measuring command: its options as they were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.plan.settings import Setting
from harness.statistics.paired import MARGIN
from harness.timing.rounds import Disturbed


@dataclass(frozen=True)
class Request:
    """The command line of `run`, not yet interpreted; of `toggle`, with the settings that it compares; of
    `compare --revisions`, with a source tree in each setting."""

    op: str | None = None
    impl: str | None = None
    suite: str | None = None
    case: Sequence[str] = ()
    boundary: str | None = None
    baseline: str | None = None
    device: str | None = None
    cluster: str | None = None
    """The address of a Ray cluster; `device` is then a type of its devices."""
    cache: str | None = None
    launch: str | None = None
    budget: str | None = None
    per_case: str | None = None
    set: Sequence[str] = ()
    margin: float = MARGIN
    settings: Sequence[Setting] = ()
    flags: dict[str, list[str | None]] = field(default_factory=dict)
    resume: str | None = None
    retry: bool = False
    out: str | None = None
    json: str | None = None
    csv: str | None = None
    published: bool = False
    quiet: bool = False
    disturbed: Disturbed | None = None
    seed: int | None = None
    threads: int | None = None
    prepare_timeout: float = 900.0
    call_timeout: float = 120.0


PLANNING = (
    *("impl", "suite", "case", "boundary", "baseline", "cache"),
    *("launch", "set", "out", "seed", "threads"),
)
"""The options that decide a run's plan, and so cannot be given again when the run is resumed."""
