"""Specification of a campaign: its steps, the most valuable first, from a TOML file or by default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import kernels
from harness.errors import UsageError, mistake
from harness.files import read_toml
from harness.plan.budget import parse_seconds
from harness.plan.select import choose_op

DEFAULTS = Path(__file__).parent / "defaults"
CASEWISE = ("run", "toggle", "tune")
"""Commands whose cases are measured one by one, on whichever device is free; others run whole."""
REFUSED = (
    "out", "resume", "retry", "json", "csv", "cluster", "op", "threads", "journal", "quiet",
    "budget", "device", "target", "shard", "check", "published",
)  # fmt: skip
"""Options of CASEWISE commands that are the campaign's own."""

Option = str | int | float | bool | list[str]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StepTable(_Table):
    """A `[[step]]`.

    ops:      of commands that take one; each is a run of its own. Default: all
    options:  the command's own, by their long names; {out} is the step's folder, {budget} 0.8 of its share
    devices:  types of them; default: all there are
    repeats:  how often it is made anew
    share:    of the campaign's time, at most, but for CASEWISE commands; expected: seconds, without a share
    """

    command: Literal["run", "toggle", "tune", "doctor", "serving replay"]
    name: str = Field("", pattern=r"^[\w.-]*$")
    ops: list[str] = []
    options: dict[str, Option] = {}
    devices: list[str] = []
    repeats: int = Field(1, ge=1, le=100)
    share: float | None = Field(None, gt=0, le=1)
    expected: str = "60s"


class CampaignSpec(_Table):
    """step: in the order of their value"""

    step: list[StepTable] = Field(min_length=1)


@dataclass(frozen=True)
class Step:
    """A command for one op, or for none.

    rank:      its table's place; steps of one rank take samples
    arguments: as in a command line, after the command's name
    devices:   types of them; empty: all
    kind:      of platform; empty: all
    """

    name: str
    command: str
    rank: int
    op: str
    arguments: Sequence[str]
    devices: Sequence[str] = ()
    share: float | None = None
    expected_s: float = 60.0
    kind: str = ""

    def is_for(self, type: str, kind: str) -> bool:
        """Whether it is measured on devices of a type, of a kind of platform."""
        return type in (self.devices or [type]) and self.kind in ("", kind)

    @property
    def casewise(self) -> bool:
        return self.command in CASEWISE

    def whole_command(self, budget_s: float) -> list[str]:
        """Python's arguments. budget_s: what {budget} stands for"""
        words = ["-m", "harness", *self.command.split(), *self.arguments]
        return [word.replace("{budget}", f"{budget_s:.0f}s") for word in words]


def steps_of(file: str | None, kinds: Iterable[str]) -> list[Step]:
    """Of a file; without one the default steps of each kind of platform, for it alone. Raises UsageError."""
    if file:
        return steps(load_spec(Path(file)))
    return [
        replace(step, kind=kind)
        for kind in dict.fromkeys(kinds)
        for step in steps(load_spec(DEFAULTS / f"{kind}.toml"))
    ]


def load_spec(path: Path) -> CampaignSpec:
    """Raises UsageError, which names the key."""
    try:
        return CampaignSpec.model_validate(read_toml(path))
    except ValidationError as error:
        raise UsageError(f"cannot read {path}: {mistake(error)}") from None


def steps(spec: CampaignSpec) -> list[Step]:
    """Each for one op and one repeat. Raises UsageError for an op that is not there, an option that is the
    campaign's own, and a name that two have."""
    made = [step for rank, table in enumerate(spec.step) for step in _steps(table, rank)]
    names = [step.name for step in made]
    if double := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"two steps are called {double!r}: give one a name")
    return made


def _steps(table: StepTable, rank: int) -> Iterator[Step]:
    casewise = table.command in CASEWISE
    if casewise and table.share is not None:
        raise UsageError(f"step {rank + 1}: leave out share: {table.command} takes what its cases take")
    if not casewise and table.ops:
        raise UsageError(f"step {rank + 1}: {table.command} takes no ops")
    if casewise and (own := next((name for name in table.options if name in REFUSED), "")):
        raise UsageError(f"step {rank + 1}: leave out the option {own}: it is the campaign's own")
    for op in [choose_op(op).name for op in table.ops or kernels.OPS] if casewise else [""]:
        for repeat in range(table.repeats):
            name = table.name or "-".join(_words(table))
            again = f"-{repeat + 1}" if table.repeats > 1 else ""
            yield Step(
                name=f"{op}-{name}{again}" if op else f"{name}{again}",
                command=table.command,
                rank=rank,
                op=op,
                arguments=[*(["--op", op] if op else []), *_arguments(table.options)],
                devices=table.devices,
                share=table.share,
                expected_s=parse_seconds(table.expected, "expected"),
            )


def _words(table: StepTable) -> list[str]:
    """Of its name: of a run the suite says enough."""
    command = [] if table.command == "run" else [table.command.replace(" ", "-")]
    suite = table.options.get("suite", "smoke" if table.command == "run" else "")
    return [*command, *([str(suite)] if suite else [])]


def _arguments(options: dict[str, Option]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        if value is False:
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    return words
