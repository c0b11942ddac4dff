"""NVML without a GPU: the functions and errors of pynvml.py in nvidia-ml-py 13.615.71 that the suite uses."""

from types import SimpleNamespace
from typing import Any

# Of NVMLError._errcode_to_string.
TEXTS = {
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return TEXTS[self.value]


class Handle:
    """Like c_nvmlDevice_t: it can only be handed back."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


class FakeNvml:
    """refused: function -> the error code that it answers with. Functions in `absent` do not exist."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 3, 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, uuids: tuple[str, ...] = ("GPU-aa",), absent: tuple[str, ...] = ()) -> None:
        self.handles = [Handle(uuid) for uuid in uuids]
        self.absent = absent
        self.started = False
        self.asked: set[str] = set()
        self.refused: dict[str, int] = {}
        self.clocks = {1: 1980, 2: 2619}
        self.reasons, self.milliwatts, self.celsius, self.mode, self.utilisation = 0, 512_345, 61, 0, 0
        self.violations = {0: 0, 1: 0}
        self.processes: dict[int, int | None] = {}
        self.samples: list[tuple[int, int, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            if name in self.absent:
                raise AttributeError(f"module 'pynvml' has no attribute '{name}'")
            if name in self.refused:
                return lambda *arguments: self._fail(self.refused[name])
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        """What a device says of itself now."""
        said = {
            "nvmlDeviceGetClockInfo": lambda type: self.clocks[type],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda: self.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: self.reasons,
            "nvmlDeviceGetTemperature": lambda sensor: self.celsius,
            "nvmlDeviceGetTemperatureV": lambda sensor: self.celsius,
            "nvmlDeviceGetPowerUsage": lambda: self.milliwatts,
            "nvmlDeviceGetComputeMode": lambda: self.mode,
            "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(gpu=self.utilisation, memory=0),
            "nvmlDeviceGetViolationStatus": lambda policy: SimpleNamespace(
                referenceTime=0, violationTime=self.violations[policy]
            ),
            "nvmlDeviceGetComputeRunningProcesses": lambda: [
                SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.processes.items()
            ],
        }
        if name in self.absent or name not in said:
            raise AttributeError(f"module 'pynvml' has no attribute '{name}'")

        def ask(handle: Handle, *arguments: Any) -> Any:
            assert self.started
            self.asked.add(handle.uuid)
            return said[name](*arguments)

        return ask

    def _fail(self, code: int) -> Any:
        raise NVMLError(code)

    def nvmlInit(self) -> None:
        self.started = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        return next((handle for handle in self.handles if handle.uuid == uuid), None) or self._fail(6)

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return "/usr/bin/python3" if pid <= 100_000 else self._fail(6)

    def nvmlDeviceGetProcessUtilization(self, handle: Handle, timeStamp: int) -> list[SimpleNamespace]:
        """samples: (pid, microseconds since 1970, per cent of the SMs' time)"""
        if not isinstance(timeStamp, int):
            raise TypeError("an integer is required")  # c_ulonglong takes no float
        later = [s for s in self.samples if s[1] > timeStamp] or self._fail(6)
        return [SimpleNamespace(pid=p, timeStamp=t, smUtil=u, memUtil=0) for p, t, u in later]
