"""NVIDIA GPU monitor: clocks, slowdowns, processes, through NVML (nvidia-ml-py). It ran on H100 and H200."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from types import ModuleType

from harness.machine.monitor.base import Blind, GpuMonitor, GpuReading, Holder, Monitor, WorkerPids
from kernels.platform import Platform

POWER_CAP = "software power cap"
THERMAL = "thermal slowdown"
IDLE = 0x1  # the bit of a device without work
REASONS = {
    0x2: "clock setting",
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, with the names that nvidia-smi gives them (nvml.h)."""
NOT_DISTURBING = {POWER_CAP, "clock setting", "sync boost", "display clock setting"}
POLICIES = {0: POWER_CAP, 1: THERMAL}
"""NVML_PERF_POLICY_*: each counts the nanoseconds in which it kept the clock below the requested one. Field
values have finer reasons, but their numbers differ between releases of the driver (251 or 269)."""

# The first function that the library and the driver have is called: releases differ in names.
CLOCK_REASONS = ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]
TEMPERATURE = ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"]
EXCLUSIVE = {1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}  # NVML_COMPUTEMODE_*


def open_nvidia(platform: Platform, worker_pids: WorkerPids, nvml: ModuleType | None = None) -> Monitor:
    """A monitor of the device, which is found by its UUID, or a monitor that says why it reads nothing."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Blind("nvidia-ml-py is not installed")
    if not platform.uuid:
        return Blind(f"the UUID of {platform.device} is not known")
    try:
        nvml.nvmlInit()
        return NvidiaMonitor(platform, worker_pids, nvml, nvml.nvmlDeviceGetHandleByUUID(platform.uuid))
    except nvml.NVMLError as error:
        return Blind(f"NVML: {error}")


class NvidiaMonitor(GpuMonitor):
    clock_name = "SM clock"
    library_name = "nvidia-ml-py"
    error_name = "NVMLError"
    power = POWER_CAP
    disturbing = frozenset([THERMAL, *REASONS.values()]) - NOT_DISTURBING

    clock: Callable[[], float] = staticmethod(time.perf_counter)
    wall: Callable[[], float] = staticmethod(time.time)
    since = 0  # when the round began, in microseconds, as the driver counts

    def begin(self) -> None:
        super().begin()
        self.since = int(self.wall() * 1e6)

    def blocked(self) -> str:
        mode = self._ask("compute mode", ["nvmlDeviceGetComputeMode"])
        if mode not in EXCLUSIVE:
            return ""
        how = "`nvidia-smi -c DEFAULT` (as root) allows that"
        return f"{self.device} is in {EXCLUSIVE[mode]} mode and our workers must share it: {how}"

    def complaints(self) -> list[str]:
        lines = super().complaints()
        if self.is_slice:
            unseen = "what runs on the other slices of its GPU is not seen"
            lines.append(f"{self.device} is a MIG slice: {unseen}")
        return lines

    def _read(self) -> GpuReading:
        nvml = self.library
        # Each call takes about 1 ms, in which the work may end: reasons before and after the clock count.
        bits_before = self._ask("clock reasons", CLOCK_REASONS)
        sm_mhz = self._ask("sm_clock_mhz", ["nvmlDeviceGetClockInfo"], nvml.NVML_CLOCK_SM)
        bits_after = self._ask("clock reasons", CLOCK_REASONS)
        busy = None
        slowed = frozenset[str]()
        if bits_before is not None and bits_after is not None:
            bits = bits_before | bits_after
            busy = not bits & IDLE
            slowed = frozenset(reason for bit, reason in REASONS.items() if bits & bit)
        values = {"temperature_c": self._ask("temperature_c", TEMPERATURE, nvml.NVML_TEMPERATURE_GPU)}
        milliwatts = self._ask("power_w", ["nvmlDeviceGetPowerUsage"])
        if milliwatts is not None:
            values["power_w"] = milliwatts / 1e3
        if busy is not False:
            memory_mhz = self._ask("memory_clock_mhz", ["nvmlDeviceGetClockInfo"], nvml.NVML_CLOCK_MEM)
            values["memory_clock_mhz"] = memory_mhz
        values = {quantity: value for quantity, value in values.items() if value is not None}
        return GpuReading(values, sm_mhz, busy, slowed)

    def _slowdown_counters(self) -> tuple[float, dict[str, float]]:
        """In seconds. CUDA 14 removes the function for it; readings then still have reasons."""
        slowed = {}
        for policy, reason in POLICIES.items():
            violation = self._ask(f"{reason} counter", ["nvmlDeviceGetViolationStatus"], policy)
            if violation is not None:
                slowed[reason] = violation.violationTime / 1e9
        return self.clock(), slowed

    def _holders(self) -> dict[int, Holder]:
        processes = self._ask("processes", ["nvmlDeviceGetComputeRunningProcesses"]) or []
        return {p.pid: (self._name(p.pid), p.usedGpuMemory) for p in processes}

    def _name(self, pid: int) -> str:
        try:
            return str(self.library.nvmlSystemGetProcessName(pid)).rpartition("/")[2]
        except self.library.NVMLError:
            return ""

    def _ran(self) -> dict[int, str]:
        """By what the driver has read since the round began, about six times a second. In a short round it
        may have read nothing, and then the next round gets what ran in this one."""
        try:
            readings = self.library.nvmlDeviceGetProcessUtilization(self.handle, self.since)
        except self.library.NVMLError as error:
            if error.value != self.library.NVML_ERROR_NOT_FOUND:  # it means that nothing was read
                self.notes.unread["process utilisation"] = str(error)
            return {}
        highest: dict[int, int] = {}
        for reading in readings:
            highest[reading.pid] = max(highest.get(reading.pid, 0), reading.smUtil)
        return {pid: f"{percent} % of the SMs' time" for pid, percent in highest.items() if percent > 0}

    def _utilisation(self) -> float | None:
        rates = self._ask("utilisation_percent", ["nvmlDeviceGetUtilizationRates"])
        return None if rates is None else rates.gpu
