"""Entries: implementations under a setting, a launch mode and a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.plan.settings import PLAIN, Setting
from kernels.op import Implementation
from shapes.case import Case, text_of

Status = Literal["ok", "checked", "wrong", "unsupported", "impossible", "error", "crashed", "timeout"]


@dataclass(frozen=True)
class ConfigSearch:
    """How the configurations of a race were found."""

    baseline: dict[str, Any]
    """What the others are compared with: what would be used without the race."""
    origin: str
    """Where the baseline comes from."""
    considered: int
    """How many configurations there are."""
    pruned: dict[str, int]
    """How many of them were left out, by reason."""
    raced: int
    """How many were not left out."""
    tables: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """For an engine's kernel: the engine's files with what it takes at present by M."""


Configs = tuple[Sequence[dict[str, Any] | None], ConfigSearch | None]
"""The configurations under which an implementation enters a case, the baseline's first, and how they were
found, for the record. None instead of a configuration: the one that the implementation chooses itself."""
ConfigsOf = Callable[[Implementation, Case], Configs]


def own_choice(implementation: Implementation, case: Case) -> Configs:
    return [None], None


def entry_name(
    impl: str, setting: str, launch: str, platform: str, config: Mapping[str, Any] | None = None
) -> str:
    """What verdicts call a cell: the implementation, with what is not the rule: a setting that sets
    something, an eager launch on a GPU, a configuration that it was told to use."""
    special = [f"@ {setting}"] if setting != PLAIN else []
    special += ["eager"] if launch == "eager" and platform != "cpu" else []
    special += [text_of(config)] if config else []
    return " ".join([impl, *special])


@dataclass
class Entry:
    """An implementation under a setting and a launch mode.

    name:           unique in its case
    config:         of a tunable implementation, that it is told to use; None: it chooses
    status, reason: where it ended; None while nothing is against it
    beaten:         by whom in the eliminations of a race, after which it got no more time
    setup_s:        preparing, JIT and first call, at their longest
    call_s:         one call, roughly: the last one that was checked
    check:          the judge's last report
    kernels:        what ran in a call (see workers/child/profile.py)
    picked:         what its library says that it chose to run
    source:         a hash of its code (see workers/child/source_hash.py)
    ran:            what is known of that beside the kernels' names (see workers/child/fingerprint.py)
    synchronises:   whether its calls wait for the device before they return
    host_s:         of each turn on a GPU: the host's seconds to launch one call
    pinned:         the CPU that each of its worker's threads is bound to, or why none is
    """

    name: str
    impl: Implementation
    setting: Setting
    launch: str
    interpreted: bool = False
    config: dict[str, Any] | None = None
    status: Status | None = None
    reason: str = ""
    beaten: str = ""
    setup_s: float = 0.0
    call_s: float = 0.0
    check: dict[str, Any] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    picked: str = ""
    ran: list[str] = field(default_factory=list)
    source: str = ""
    synchronises: bool = False
    host_s: list[float] = field(default_factory=list)
    pinned: list[int] | str = ""

    @property
    def alive(self) -> bool:
        return self.status is None and not self.beaten

    def fail(self, status: Status, reason: str) -> None:
        if self.alive:
            self.status, self.reason = status, reason
