"""What a driver orders of a device's agent, and what it is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.results.schema import DeviceUsed, Record, Run
from harness.run.device import DeviceFacts
from harness.run.request import Request
from kernels.tuning import Target


@dataclass(frozen=True)
class Opening:
    """Takes the device and says what it is.

    type:         of device, as the pool calls it
    threads:      of each worker, on a CPU; None: the agent's default
    memory_share: of its machine's memory, which other devices of the pool use too
    device:       as torch calls it; None: the first GPU that the agent is shown, else the CPU
    is_gpu:       whether it must be one; None: it may
    """

    type: str
    threads: int | None = None
    memory_share: float = 1.0
    device: str | None = None
    is_gpu: bool | None = None


@dataclass(frozen=True)
class Opened:
    """used: the device as records name it; target: what configurations are chosen for there"""

    used: DeviceUsed
    facts: DeviceFacts
    target: Target


@dataclass(frozen=True)
class CaseOrder:
    """Measures one case of a run, whole.

    request:  what of a command line does not stand in the run's record
    case:     its key
    budget_s: of measuring; max_s: where one round in each block takes longer
    """

    run: Run
    request: Request
    case: str
    budget_s: float
    max_s: float


@dataclass(frozen=True)
class CommandOrder:
    """Runs `python` with these arguments; `{out}` among them is a folder whose files are brought back.

    deadline_s: when it is killed
    """

    arguments: Sequence[str]
    deadline_s: float


@dataclass(frozen=True)
class CommandDone:
    """code: its exit code, None where it was killed; output: the end of what it printed"""

    code: int | None
    output: str
    files: Mapping[str, bytes]


Order = Opening | CaseOrder | CommandOrder
Result = Opened | list[Record] | CommandDone


@dataclass(frozen=True)
class Answer:
    """Of the agent on a device to the last order that it was sent.

    result: None where there is none, for the reason `error`
    lost:   whether the agent is gone with it
    """

    device: str
    result: Result | None
    error: str = ""
    lost: bool = False
