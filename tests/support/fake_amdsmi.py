"""AMD SMI without a GPU: the functions of amdsmi_interface.py in amdsmi 7.0.2 that the monitor uses."""

from ctypes import c_void_p
from typing import Any

# AMDSMI_STATUS_* codes, with the texts of amdsmi_exception.py.
TEXTS = {
    2: "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported",
    34: "AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded",
}


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code
        self.err_info = TEXTS[err_code]

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | {self.err_info}"


class Handle(c_void_p):
    """Like amdsmi_processor_handle."""


def metrics_of_an_mi300x() -> dict[str, Any]:
    """The keys of amdsmi_get_gpu_metrics_info that the monitor reads; "N/A" means no value."""
    return {
        "temperature_hotspot": 58,
        "average_gfx_activity": 100,
        "average_socket_power": "N/A",
        "current_socket_power": 640,
        "current_gfxclk": 2100,
        "current_gfxclks": [2100, 2095, 2098, 2100, 2100, 2099, 2100, 2097],
        "current_uclk": 1300,
        "throttle_status": "N/A",
        "accumulation_counter": 1_000_000,
        "prochot_residency_acc": 0,
        "ppt_residency_acc": 5_000,
        "socket_thm_residency_acc": 70,
        "vr_thm_residency_acc": 0,
        "hbm_thm_residency_acc": 0,
    }


class FakeAmdSmi:
    """refused: function -> the status code that it answers with. Functions in `absent` do not exist.
    nodes: the kernel driver's number of each device, from 1, in the library's order."""

    AmdSmiException = AmdSmiException

    def __init__(self, nodes: tuple[int, ...] = (1,), absent: tuple[str, ...] = ()) -> None:
        self.handles = [Handle(node) for node in nodes]
        self.absent = absent
        self.started = False
        self.refused: dict[str, int] = {}
        self.asked: set[int] = set()
        self.metrics = metrics_of_an_mi300x()
        self.processes: list[dict[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("amdsmi"):
            if name in self.absent:
                raise AttributeError(f"module 'amdsmi' has no attribute '{name}'")
            if name in self.refused:
                return lambda *arguments: self._fail(self.refused[name])
        return super().__getattribute__(name)

    def _fail(self, code: int) -> None:
        raise AmdSmiLibraryException(code)

    def amdsmi_init(self, flag: int = 2) -> None:
        self.started = True

    def amdsmi_get_processor_handles(self) -> list[Handle]:
        assert self.started
        return self.handles

    def amdsmi_get_gpu_kfd_info(self, processor_handle: Handle) -> dict[str, Any]:
        return {"kfd_id": 7, "node_id": processor_handle.value, "current_partition_id": 0}

    def amdsmi_get_gpu_enumeration_info(self, processor_handle: Handle) -> dict[str, Any]:
        return {"hip_id": 0, "hip_uuid": f"GPU-{processor_handle.value:x}0af"}

    def amdsmi_get_gpu_metrics_info(self, processor_handle: Handle) -> dict[str, Any]:
        self.asked.add(processor_handle.value)
        return dict(self.metrics)

    def amdsmi_get_gpu_process_list(self, processor_handle: Handle) -> list[dict[str, Any]]:
        return [dict(process) for process in self.processes]

    def process(self, pid: int, units: int | str, held: int | str = 0, name: str = "python3") -> None:
        self.processes.append({"name": name, "pid": pid, "mem": held, "cu_occupancy": units})
