"""A monitor that reports what a test says."""

from collections.abc import Iterable

from harness.machine.monitor.base import Monitor

WHO = "process 7 (cc1plus) took 80% of a CPU"


class Scripted(Monitor):
    """Each round ends with the next text of `says`. `log` has the calls, `sampled` the works."""

    def __init__(self, says: Iterable[str], busy: Iterable[str] = (), blocked: str = "") -> None:
        super().__init__()
        self.says, self.busy, self.why = iter(says), list(busy), blocked
        self.sampled: set[str] = set()
        self.log: list[str] = []

    def begin(self) -> None:
        self.log.append("begin")

    def sample(self, work: str = "") -> None:
        self.log.append("sample")
        self.sampled.add(work)
        self.notes.add("frequency_mhz", 2400)

    def end(self) -> str:
        self.log.append("end")
        return next(self.says)

    def complaints(self) -> list[str]:
        return self.busy

    def current_values(self) -> dict[str, str]:
        return {}

    def blocked(self) -> str:
        return self.why
