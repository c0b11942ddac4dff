"""AMD GPU monitor: clocks, slowdowns and processes, through AMD SMI (amdsmi). Untested on hardware.

All but the processes comes from one table, the GPU metrics, which one call reads. The library has a call for
violations too, amdsmi_get_violation_status; it reads the same table twice, 0.1 s apart, and waits.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from harness.errors import one_line
from harness.machine.monitor.base import Blind, Monitor, Ours
from harness.machine.monitor.gpu import GpuMonitor, Holder, Look
from kernels.gpus.visibility import VARIABLES, visible
from kernels.platform import Platform

POWER_LIMIT = "package power limit"
# Metrics that count for how many of `accumulation_counter` steps each was on (MI300 and newer).
RESIDENCIES = {
    "prochot_residency_acc": "processor hot",
    "ppt_residency_acc": POWER_LIMIT,
    "socket_thm_residency_acc": "socket thermal slowdown",
    "vr_thm_residency_acc": "voltage regulator thermal slowdown",
    "hbm_thm_residency_acc": "HBM thermal slowdown",
}
# Older devices tell only whether something throttles, power included: noted, and no disturbance.
THROTTLED = "throttled, cause not told"
# quantity -> the metrics that may have it, the first that is there
QUANTITIES = {
    "memory_clock_mhz": ("current_uclk",),
    "hotspot_c": ("temperature_hotspot",),
    "power_w": ("current_socket_power", "average_socket_power"),
}
# Per cent of the firmware's last averaging: below it the clock may be one of a device that rests already.
AT_WORK = 50


def open_amd(
    platform: Platform, ours: Ours, smi: ModuleType | None = None, environment: Mapping[str, str] = os.environ
) -> Monitor:
    """A monitor of the device that torch calls `platform.device`, or one that says why it sees nothing.
    smi: the library; amdsmi where it is not given."""
    if smi is None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # it prints what it does not find
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
            return AmdMonitor(platform, ours, smi, handles[index])
        variables = _hiding(environment)
        left = f", of which {variables} leave {len(handles)}" if variables else ""
        return Blind(f"amdsmi shows {len(known)} devices{left}: {platform.device} is none of these")
    except smi.AmdSmiException as error:
        return Blind(f"amdsmi: {_message(error)}")


def _hiding(environment: Mapping[str, str]) -> str:
    """The variables that are set of those that hide devices."""
    return " and ".join(name for group in VARIABLES["rocm"] for name in group if name in environment)


def _message(error: Exception) -> str:
    return str(getattr(error, "err_info", "") or one_line(error))


def _in_order(smi: ModuleType, handles: Sequence[object]) -> list[object]:
    """Those that the kernel driver numbers, in the order of its numbers, as ROCm counts; what it does not
    number was not given to this container. Where no number is told the library's order stays."""
    numbered = [(node, handle) for handle in handles if (node := _node(smi, handle)) is not None]
    return [handle for _, handle in sorted(numbered, key=lambda pair: pair[0])] or list(handles)


def _node(smi: ModuleType, handle: object) -> int | None:
    try:
        return int(smi.amdsmi_get_gpu_kfd_info(handle)["node_id"])
    except (AttributeError, ValueError, smi.AmdSmiException):
        return None


def _unique_name(smi: ModuleType, handle: object) -> str:
    try:
        return str(smi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"])
    except (AttributeError, smi.AmdSmiException):
        return ""


def _number(value: object) -> float | None:
    """The library says "N/A" where the device has no such value."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


class AmdMonitor(GpuMonitor):
    clock_name = "GFX"
    power = POWER_LIMIT
    disturbing = frozenset(RESIDENCIES.values()) - {POWER_LIMIT}

    def __init__(self, platform: Platform, ours: Ours, smi: ModuleType, handle: object) -> None:
        self.smi = smi
        self.handle = handle
        self.last: tuple[float, dict[str, float]] = (0.0, {})
        super().__init__(platform, ours)

    def begin(self) -> None:
        super().begin()
        self.last = (self.elapsed, dict(self.slowed_before))

    def _ask(
        self, quantity: str, function: str
    ) -> Any:  # what amdsmi answers: dicts and lists without a type
        """What the library answers, or None, with the reason noted."""
        try:
            return getattr(self.smi, function)(self.handle)
        except AttributeError:
            self.notes.unread[quantity] = f"this amdsmi has no {function}"
        except self.smi.AmdSmiException as error:
            self.notes.unread[quantity] = _message(error)
        return None

    def _metrics(self) -> dict[str, object]:
        return self._ask("GPU metrics", "amdsmi_get_gpu_metrics_info") or {}

    def _look(self) -> Look:
        metrics = self._metrics()
        if not metrics:
            return Look()
        values = {}
        for quantity, keys in QUANTITIES.items():
            numbers = [n for key in keys if (n := _number(metrics.get(key))) is not None]
            if numbers:
                values[quantity] = numbers[0]
            else:
                self.notes.unread[quantity] = "the device does not tell it"
        activity = _number(metrics.get("average_gfx_activity"))
        busy = None if activity is None else activity >= AT_WORK
        if busy is False:
            values.pop("memory_clock_mhz", None)
        return Look(values, self._slowest(metrics), busy, self._slowed(metrics))

    def _slowest(self, metrics: Mapping[str, object]) -> float | None:
        """MHz of the slowest of the dies: a kernel waits for it. Dies that are not there show 0 or N/A."""
        listed = metrics.get("current_gfxclks")
        several: Sequence[object] = listed if isinstance(listed, list) else []
        clocks = [n for n in map(_number, [*several, metrics.get("current_gfxclk")]) if n]
        if not clocks:
            self.notes.unread["gfx_clock_mhz"] = "the device does not tell it"
        return min(clocks, default=None)

    def _slowed(self, metrics: Mapping[str, object]) -> frozenset[str]:
        """What was on since the last look."""
        elapsed, slowed = self._residencies(metrics)
        before, slowed_before = self.last
        self.last = elapsed, slowed
        on = {r for r in slowed.keys() & slowed_before.keys() if slowed[r] - slowed_before[r] > 0}
        if not slowed and metrics.get("throttle_status") is True:
            on.add(THROTTLED)
        return frozenset(on if elapsed > before or not slowed else ())

    def _slowdown_counters(self) -> tuple[float, dict[str, float]]:
        metrics = self._metrics()
        elapsed, slowed = self._residencies(metrics)
        if metrics and not slowed:
            self.notes.unread["slowdown counters"] = "the device does not tell them"
        return elapsed, slowed

    def _residencies(self, metrics: Mapping[str, object]) -> tuple[float, dict[str, float]]:
        """The counters' running number of steps, and for how many of them each reason was on."""
        steps = _number(metrics.get("accumulation_counter"))
        if steps is None:
            return 0.0, {}
        counts = {reason: _number(metrics.get(key)) for key, reason in RESIDENCIES.items()}
        return steps, {reason: count for reason, count in counts.items() if count is not None}

    def _holders(self) -> dict[int, Holder]:
        return {
            process["pid"]: Holder(
                "" if process["name"] == "N/A" else process["name"], _number(process.get("mem"))
            )
            for process in self._ask("processes", "amdsmi_get_gpu_process_list") or []
        }

    def _ran(self) -> dict[int, str]:
        """Who occupies compute units now, while none of ours works: between samples, that is."""
        processes = self._ask("processes", "amdsmi_get_gpu_process_list") or []
        units = {process["pid"]: _number(process.get("cu_occupancy")) for process in processes}
        if any(count is None for count in units.values()):
            self.notes.unread["compute units by process"] = "not told"
        return {pid: f"{count:.0f} compute units" for pid, count in units.items() if count}

    def _utilisation(self) -> float | None:
        return _number(self._metrics().get("average_gfx_activity"))
