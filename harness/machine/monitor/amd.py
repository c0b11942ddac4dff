"""AMD GPU monitor: clocks, slowdowns and processes, through AMD SMI (amdsmi). Untested on hardware.

Everything but the processes comes from the table of GPU metrics, which one call reads. The library also has
amdsmi_get_violation_status, which is not used: it reads the same table twice and waits 0.1 s in between.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from harness.errors import one_line
from harness.machine.monitor.base import Blind, GpuMonitor, GpuReading, Holder, Monitor, WorkerPids
from kernels.gpus import VARIABLES, visible
from kernels.platform import Platform

POWER_LIMIT = "package power limit"
RESIDENCIES = {
    "prochot_residency_acc": "processor hot",
    "ppt_residency_acc": POWER_LIMIT,
    "socket_thm_residency_acc": "socket thermal slowdown",
    "vr_thm_residency_acc": "voltage regulator thermal slowdown",
    "hbm_thm_residency_acc": "HBM thermal slowdown",
}
"""Metrics that count the steps of `accumulation_counter` in which each reason was on (MI300 and newer)."""
THROTTLED = "throttled, cause not told"  # of older devices, for power too: it does not disturb a round
QUANTITIES = {
    "memory_clock_mhz": ("current_uclk",),
    "hotspot_c": ("temperature_hotspot",),
    "power_w": ("current_socket_power", "average_socket_power"),
}
"""Quantity -> the metrics that may hold it; the first that the device has is taken."""
AT_WORK = 50
"""Per cent of activity in the firmware's last interval. Below it the clock may be that of an idle device."""


def open_amd(
    platform: Platform,
    worker_pids: WorkerPids,
    smi: ModuleType | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Monitor:
    """A monitor of the device that torch calls `platform.device`, or one that says why it reads nothing."""
    if smi is None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # amdsmi prints what it does not find
                smi = importlib.import_module("amdsmi")
        except ImportError:
            return Blind("amdsmi is not installed")
        except Exception as error:
            return Blind(f"amdsmi cannot be imported: {one_line(error)}")
    try:
        smi.amdsmi_init()
        known = _in_order(smi, smi.amdsmi_get_processor_handles())
        if not known:
            return Blind("amdsmi shows no device: it is not of this ROCm, whose own is in share/amd_smi")
        handles = visible("rocm", known, lambda handle: _unique_name(smi, handle), environment)
        index = int(platform.device.partition(":")[2] or 0)
        if index < len(handles):
            return AmdMonitor(platform, worker_pids, smi, handles[index])
        hiding = " and ".join(name for group in VARIABLES["rocm"] for name in group if name in environment)
        left = f", of which {hiding} leave {len(handles)}" if hiding else ""
        return Blind(f"amdsmi shows {len(known)} devices{left}: {platform.device} is none of these")
    except smi.AmdSmiException as error:
        return Blind(f"amdsmi: {_message(error)}")


def _message(error: Exception) -> str:
    return str(getattr(error, "err_info", "") or one_line(error))


def _in_order(smi: ModuleType, handles: Sequence[object]) -> list[object]:
    """The devices that the kernel driver numbers, in the order of its numbers, as ROCm counts them. A device
    without a number was not given to this container. If no device has one, the library's order stays."""
    numbered: list[tuple[int, object]] = []
    for handle in handles:
        with contextlib.suppress(AttributeError, ValueError, smi.AmdSmiException):
            numbered.append((int(smi.amdsmi_get_gpu_kfd_info(handle)["node_id"]), handle))
    numbered.sort(key=operator.itemgetter(0))
    return [handle for _, handle in numbered] if numbered else list(handles)


def _unique_name(smi: ModuleType, handle: object) -> str:
    """The UUID as HIP gives it; empty where the library does not tell it."""
    try:
        return str(smi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"])
    except (AttributeError, smi.AmdSmiException):
        return ""


def _number(value: object) -> float | None:
    """A number, or None: the library answers "N/A" where the device has no such value."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


class AmdMonitor(GpuMonitor):
    clock_name = "GFX clock"
    library_name = "this amdsmi"
    error_name = "AmdSmiException"
    _message = staticmethod(_message)
    power = POWER_LIMIT
    disturbing = frozenset(RESIDENCIES.values()) - {POWER_LIMIT}

    last: tuple[float, Mapping[str, float]] = (0.0, {})  # the slowdown counters at the last reading

    def begin(self) -> None:
        super().begin()
        self.last = (self.elapsed_before, self.slowed_before)

    def _metrics(self) -> dict[str, object]:
        return self._ask("GPU metrics", ["amdsmi_get_gpu_metrics_info"]) or {}

    def _read(self) -> GpuReading:
        metrics = self._metrics()
        if not metrics:
            return GpuReading()
        values = {}
        for quantity, keys in QUANTITIES.items():
            numbers = [_number(metrics.get(key)) for key in keys]
            known = [number for number in numbers if number is not None]
            if known:
                values[quantity] = known[0]
            else:
                self.notes.unread[quantity] = "the device does not tell it"
        activity = _number(metrics.get("average_gfx_activity"))
        busy = None if activity is None else activity >= AT_WORK
        if busy is False:
            values.pop("memory_clock_mhz", None)
        return GpuReading(values, self._slowest(metrics), busy, self._slowed(metrics))

    def _slowest(self, metrics: Mapping[str, object]) -> float | None:
        """MHz of the slowest die, for which a kernel waits. The library gives 0 or N/A for absent dies."""
        by_die = metrics.get("current_gfxclks")
        listed = by_die if isinstance(by_die, list) else []
        numbers = [_number(value) for value in [*listed, metrics.get("current_gfxclk")]]
        clocks = [number for number in numbers if number]
        if not clocks:
            self.notes.unread["gfx_clock_mhz"] = "the device does not tell it"
        return min(clocks, default=None)

    def _slowed(self, metrics: Mapping[str, object]) -> frozenset[str]:
        """The reasons for a slowdown since the last reading."""
        elapsed, slowed = self._residencies(metrics)
        elapsed_before, slowed_before = self.last
        self.last = elapsed, slowed
        if not slowed:
            return frozenset([THROTTLED]) if metrics.get("throttle_status") is True else frozenset()
        if elapsed <= elapsed_before:
            return frozenset()
        counted = slowed.keys() & slowed_before.keys()
        return frozenset(reason for reason in counted if slowed[reason] > slowed_before[reason])

    def _slowdown_counters(self) -> tuple[float, dict[str, float]]:
        metrics = self._metrics()
        elapsed, slowed = self._residencies(metrics)
        if metrics and not slowed:
            self.notes.unread["slowdown counters"] = "the device does not tell them"
        return elapsed, slowed

    def _residencies(self, metrics: Mapping[str, object]) -> tuple[float, dict[str, float]]:
        """The running number of steps, and the number of those steps in which each reason was on."""
        steps = _number(metrics.get("accumulation_counter"))
        if steps is None:
            return 0.0, {}
        counts = {reason: _number(metrics.get(key)) for key, reason in RESIDENCIES.items()}
        return steps, {reason: count for reason, count in counts.items() if count is not None}

    def _holders(self) -> dict[int, Holder]:
        holders = {}
        for process in self._ask("processes", ["amdsmi_get_gpu_process_list"]) or []:
            name = "" if process["name"] == "N/A" else process["name"]
            holders[process["pid"]] = (name, _number(process.get("mem")))
        return holders

    def _ran(self) -> dict[int, str]:
        """The processes that occupy compute units now. It is called between samples, when ours are idle."""
        processes = self._ask("processes", ["amdsmi_get_gpu_process_list"]) or []
        units = {process["pid"]: _number(process.get("cu_occupancy")) for process in processes}
        if any(count is None for count in units.values()):
            self.notes.unread["compute units by process"] = "not told"
        return {pid: f"{count:.0f} compute units" for pid, count in units.items() if count}

    def _utilisation(self) -> float | None:
        return _number(self._metrics().get("average_gfx_activity"))
