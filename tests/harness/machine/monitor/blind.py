"""What a monitor that sees nothing says."""

from __future__ import annotations

from harness.machine.monitor.base import Blind, Monitor


def still_works(monitor: Monitor, reason: str) -> None:
    assert isinstance(monitor, Blind)
    monitor.begin()
    monitor.sample("anything")
    assert (monitor.end(), monitor.blocked()) == ("", "")
    assert monitor.before() == [f"clocks not read: {reason}"]
    assert monitor.conditions() == {"not_read": {"clocks": reason}}
    assert monitor.readable() == {"clocks": f"not readable: {reason}"}
