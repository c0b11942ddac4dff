"""Pool of devices, as a driver sees it: what there is, an agent on each, orders and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.cluster.orders import Answer, Order
from harness.errors import HarnessError


@dataclass(frozen=True)
class Offer:
    """A device that a pool has.

    id:     its name in the pool
    type:   H200, MI300X, cpu ...
    beside: how many devices share its machine's memory, itself among them
    device: as torch calls it; None: the first that its agent is shown
    is_gpu: None where nobody knows
    """

    id: str
    type: str
    beside: int = 1
    device: str | None = None
    is_gpu: bool | None = None


class Pool(Protocol):
    """Of devices; those of a cluster come and go. grows: whether others may come"""

    grows: bool

    def offers(self) -> Sequence[Offer]:
        """What is there now. Raises PoolGone."""

    def start(self, offer: Offer) -> None:
        """Begins to start its agent, which may be sent orders at once."""

    def send(self, device: str, order: Order) -> None:
        """To an agent that has answered its last order."""

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        """What came within that time; none may have. Raises PoolGone."""

    def stop(self, device: str) -> None:
        """Kills its agent, whatever that does; nothing where it has none."""

    def close(self) -> None:
        """Kills all of them."""


class PoolGone(HarnessError):
    """The pool itself is no more, for the reason given: its devices may do what they will."""
