"""Profile of a call, what ran in it by torch's profiler: device kernels on a GPU, operators on a CPU."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.workers.child.timers.base import Call

CALLS = 10  # of which the average is taken, fewer where they would take longer than ...
PROFILE_S = 0.2
EVENTS = 5000  # ... or give more, of which torch reads 10,000 a second
SHARE = 0.01  # of the total, under which a kernel is not listed


def start(kind: str) -> None:
    """An empty profile. A process's first one starts CUPTI, which takes 5 s (seen on an H200, CUDA 13.0)."""
    from torch.profiler import profile as torch_profiler

    with torch_profiler(activities=_activities(kind)):
        pass


def _activities(kind: str) -> list[Any]:
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CPU] if kind == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def profile(
    calls: Sequence[Call], kind: str, synchronize: Callable[[], None], call_s: float
) -> dict[str, Any]:
    """Profiles calls in rotation and gives, per call, {"kernels": [{"name", "us", "count"}], "total_us"}: own
    time and number of launches of the kernels, largest first. The total is of all, the small ones too. A call
    takes about `call_s` seconds.

    On a GPU a kernel's time is its time on the device, without the gaps between kernels.
    """
    from torch.profiler import profile as torch_profiler

    activities = _activities(kind)
    rotation = itertools.cycle(calls)
    count = max(1, int(min(CALLS, PROFILE_S / call_s)))
    if count > 1:  # the first call under a profiler holds what that prepares, of a long one a small part
        with torch_profiler(activities=activities) as profiler:
            next(rotation)()
            synchronize()
        count = max(1, min(count, EVENTS // max(1, len(profiler.events()))))
    with torch_profiler(activities=activities) as profiler:
        for _ in range(count):
            next(rotation)()
        synchronize()
    return summary(profiler.events(), count, kind)


def summary(events: Iterable[Any], calls: int, kind: str) -> dict[str, Any]:
    """Of the profiler's events (torch.autograd.profiler_util.FunctionEvent) of so many calls."""
    from torch.autograd import DeviceType

    spent: dict[str, float] = defaultdict(float)
    launched: dict[str, int] = defaultdict(int)
    for event in events:
        on_device = event.device_type != DeviceType.CPU
        # An annotation spans kernels that are listed themselves.
        if on_device == (kind != "cpu") and not event.is_user_annotation:
            spent[event.name] += event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
            launched[event.name] += 1
    total = sum(spent.values())
    kernels = [
        {"name": name, "us": spent[name] / calls, "count": launched[name] / calls}
        for name in sorted(spent, key=lambda name: -spent[name])
        if spent[name] > SHARE * total
    ]
    return {"kernels": kernels, "total_us": total / calls}
