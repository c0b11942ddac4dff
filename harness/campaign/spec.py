"""The specification of a campaign: its steps, the most valuable first, from a TOML file or by default."""

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
"""Commands whose cases are measured one by one, each on whichever device is free. Others run whole."""
REFUSED = (
    "out", "resume", "retry", "json", "csv", "cluster", "op", "threads", "journal", "quiet",
    "budget", "device", "target", "shard", "check", "published",
)  # fmt: skip
"""Options of CASEWISE commands that the campaign itself sets."""
LEAST_SHARE_S = 30.0
BUDGET_OF_SHARE = 0.8
"""The part of a whole command's time that is measuring; the rest is set-up."""

Option = str | int | float | bool | list[str]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StepTable(_Table):
    """A `[[step]]` of the file."""

    command: Literal["run", "toggle", "tune", "doctor", "serving replay"]
    name: str = Field("", pattern=r"^[\w.-]*$")
    ops: list[str] = []  # of a CASEWISE command; each is a run of its own. Default: all ops
    options: dict[str, Option] = {}
    """The command's own, by their long names. {out} is the step's folder, {budget} 0.8 of its share."""
    devices: list[str] = []  # types of devices; default: all that there are
    repeats: int = Field(1, ge=1, le=100)  # how many times the step is made, each time anew
    share: float | None = Field(None, gt=0, le=1)
    """Of a command that runs whole: its part of the campaign's time."""
    expected: str = "60s"  # of a command that runs whole and has no share: its time


class CampaignSpec(_Table):
    step: list[StepTable] = Field(min_length=1)  # the most valuable first


@dataclass(frozen=True)
class Step:
    """A command for one op, or for none."""

    name: str
    command: str
    rank: int  # the place of its table in the file; steps of one rank take turns
    op: str
    arguments: Sequence[str]  # as in a command line, after the command's name
    devices: Sequence[str] = ()  # types of devices; empty: all
    share: float | None = None
    expected_s: float = 60.0
    kind: str = ""  # kind of platform; empty: all

    def is_for(self, type: str, kind: str) -> bool:
        """Whether it is measured on devices of a type, which are of a kind of platform."""
        return type in (self.devices or [type]) and self.kind in ("", kind)

    @property
    def casewise(self) -> bool:
        return self.command in CASEWISE

    def wall_s(self, budget_s: float) -> float:
        """Seconds for a command that runs whole, of a campaign's budget."""
        return self.expected_s if self.share is None else max(LEAST_SHARE_S, self.share * budget_s)

    def whole_command(self, budget_s: float) -> list[str]:
        """Python's arguments for a command that runs whole, in a campaign of that budget."""
        words = ["-m", "harness", *self.command.split(), *self.arguments]
        measuring_s = BUDGET_OF_SHARE * self.wall_s(budget_s)
        return [word.replace("{budget}", f"{measuring_s:.0f}s") for word in words]


def steps_of(file: str | None, kinds: Iterable[str]) -> list[Step]:
    """The steps in a file; without a file the default steps of each kind of platform, for that kind alone.
    Raises UsageError."""
    if file:
        return _steps(Path(file))
    return [
        replace(step, kind=kind)
        for kind in dict.fromkeys(kinds)
        for step in _steps(DEFAULTS / f"{kind}.toml")
    ]


def _steps(file: Path) -> list[Step]:
    """A step for each op and repeat. Raises UsageError, which names the key, for a mistake in the file, an
    option that the campaign sets, and a name that two steps have."""
    try:
        spec = CampaignSpec.model_validate(read_toml(file))
    except ValidationError as error:
        raise UsageError(f"cannot read {file}: {mistake(error)}") from None
    made = [step for rank, table in enumerate(spec.step) for step in _steps_of_table(table, rank)]
    names = [step.name for step in made]
    if double := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"two steps are called {double!r}: give one a name")
    return made


def _steps_of_table(table: StepTable, rank: int) -> Iterator[Step]:
    casewise = table.command in CASEWISE
    if casewise and table.share is not None:
        raise UsageError(f"step {rank + 1}: leave out share: {table.command} takes what its cases take")
    if not casewise and table.ops:
        raise UsageError(f"step {rank + 1}: {table.command} takes no ops")
    if casewise and (own := next((name for name in table.options if name in REFUSED), "")):
        raise UsageError(f"step {rank + 1}: leave out the option {own}: it is the campaign's own")
    for op in [choose_op(op).name for op in table.ops or kernels.OPS] if casewise else [""]:
        for repeat in range(table.repeats):
            again = f"-{repeat + 1}" if table.repeats > 1 else ""
            name = f"{table.name or _default_name(table)}{again}"
            yield Step(
                name=f"{op}-{name}" if op else name,
                command=table.command,
                rank=rank,
                op=op,
                arguments=[*(["--op", op] if op else []), *arguments(table.options)],
                devices=table.devices,
                share=table.share,
                expected_s=parse_seconds(table.expected, "expected"),
            )


def _default_name(table: StepTable) -> str:
    """The command, unless it is `run`, and the suite."""
    suite = table.options.get("suite", "smoke" if table.command == "run" else "")
    command = "" if table.command == "run" else table.command.replace(" ", "-")
    return "-".join(filter(None, [command, str(suite)]))


def arguments(options: dict[str, Option]) -> list[str]:
    """Options as words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        if value is False:
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    return words
