"""Entries: implementations under a setting, in a launch mode, with a configuration. They are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.plan.settings import PLAIN, Setting
from kernels.op import Implementation
from kernels.platform import Platform
from kernels.support import Mistaken
from shapes.case import Case, text_of

Status = Literal["ok", "checked", "wrong", "unsupported", "impossible", "error", "crashed", "timeout"]


@dataclass(frozen=True)
class ConfigSearch:
    """How the configurations of a race were found."""

    baseline: dict[str, Any]  # the configuration without the race, with which the others are compared
    origin: str  # where that configuration comes from
    considered: int  # how many configurations there are
    pruned: dict[str, int]  # how many of them were left out, by reason
    raced: int  # how many of them were timed
    tables: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Table file of an engine's kernel -> M -> its present configuration (kernels.engine_tuning)."""


Config = dict[str, Any] | None  # of a tunable implementation; None: it chooses one itself
Configs = tuple[Sequence[Config], ConfigSearch | None]
"""With which configurations an implementation is measured, the baseline's first; how a race found them."""
ConfigsOf = Callable[[Implementation, Case], Configs]


def own_choice(implementation: Implementation, case: Case) -> Configs:
    """The configurations outside a race: the implementation chooses one itself."""
    return [None], None


def entry_name(impl: str, setting: str, launch: str, platform: str, config: Config = None) -> str:
    """The name of an entry in verdicts: the implementation, and what differs from the default: a setting
    other than the plain one, an eager launch on a GPU, a configuration that it has to use."""
    words = [impl]
    if setting != PLAIN:
        words.append(f"@ {setting}")
    if launch == "eager" and platform != "cpu":
        words.append("eager")
    if config:
        words.append(text_of(config))
    return " ".join(words)


@dataclass
class Entry:
    """An implementation under a setting in a launch mode, with the results of a case."""

    name: str  # unique in its case
    impl: Implementation
    setting: Setting
    launch: str  # graph or eager
    interpreted: bool = False  # whether it runs in an interpreter here: it is checked and not timed
    config: Config = None
    status: Status | None = None  # how it failed; None as long as it has not failed
    reason: str = ""  # why it failed
    beaten: str = ""  # how it lost in the eliminations of a race, after which it got no more time
    setup_s: float = 0.0  # seconds of its longest preparation, JIT compilers and the first call included
    call_s: float = 0.0  # seconds of the last call that was checked: a rough figure
    samples_s: float = 0.0  # seconds that its samples took
    check: dict[str, Any] = field(default_factory=dict)  # results of checks (see schema.Cell.check)
    kernels: list[dict[str, Any]] = field(default_factory=list)  # those that a call ran (child/profile.py)
    picked: str = ""  # what its library reports of the kernel that it chose
    ran: list[str] = field(default_factory=list)  # what else identifies the code that ran
    source: str = ""  # a hash of its code
    synchronises: bool = False  # whether its calls wait for the device before they return
    host_s: list[float] = field(default_factory=list)  # seconds of launching a call on a GPU, by sample
    pinned: list[int] | str = ""  # the CPU that each of its worker's threads is bound to, or why none is

    @property
    def alive(self) -> bool:
        """Whether it is still to be measured: it has neither failed nor lost in a race."""
        return self.status is None and not self.beaten

    def fail(self, status: Status, reason: str) -> None:
        """Writes down a failure, unless the entry has failed or lost before."""
        if self.alive:
            self.status = status
            self.reason = reason


def by_worker(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The entries of each worker: one for each setting and runtime."""
    workers: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        workers.setdefault((entry.setting.name, entry.impl.runtime), []).append(entry)
    return list(workers.values())


def entry_of(
    impl: Implementation, case: Case, platform: Platform, launch: str, setting: Setting, config: Config = None
) -> Entry:
    """The entry of an implementation in a case. Where the implementation cannot run the case, the entry has
    failed as `unsupported`; where `supports` gave no proper answer, as `error`. An implementation that is
    interpreted or cannot be captured into a graph is launched eagerly."""
    support = impl.supports(case, platform)
    interpreted = support.ok and impl.interpreted(platform)
    if interpreted or not impl.captures:
        launch = "eager"
    name = entry_name(impl.name, setting.name, launch, platform.kind, config)
    entry = Entry(name, impl, setting, launch, interpreted, config)
    if not support.ok:
        entry.fail("error" if isinstance(support, Mistaken) else "unsupported", support.reason)
    return entry
