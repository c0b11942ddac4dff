"""The NVIDIA GPUs of this machine and their MIG slices, as NVML or else nvidia-smi reports them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from kernels.gpus.visibility import visible

SMI_FOLDERS = ("/usr/local/nvidia/bin", "/usr/bin")
"""Where containers have nvidia-smi, besides PATH."""

MIG_MODES = {"Enabled": True, "Disabled": False, "[N/A]": False}
SMI_ROW = r"\s*(\d+)\.(\d+)\s*,\s*(GPU-[^,\s]+)\s*,([^,]*),(?:\s*(Enabled|Disabled|\[N/A\])\s*,)?(.*)"

ANSWER_S = 30.0
"""The seconds that nvidia-smi may take. Without persistence mode it has to start every GPU."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG slice of one."""

    arch: str
    """Such as sm_90."""
    name: str
    """The vendor's name. That of a slice ends in `MIG 1g.10gb`."""
    memory: int
    """Bytes; 0 if unknown."""
    uuid: str
    """GPU-..., or MIG-... for a slice."""
    old_name: str = ""
    """The name of a slice for drivers before 470: MIG-GPU-.../<GPU instance>/<compute instance>."""
    divided: bool | None = None
    """Whether the GPU is in MIG mode; None if unknown."""
    slices: tuple[Gpu, ...] = ()
    """The slices of a GPU in MIG mode that this process may use."""

    @property
    def usable(self) -> bool:
        return bool(self.arch) and (bool(self.slices) or not self.divided)


LOST = Gpu("", "", 0, "")
"""Stands for a GPU that the driver counts but that does not answer, so that the others keep their numbers."""


def answer(*command: str, timeout_s: float = ANSWER_S) -> tuple[str, str]:
    """What a command prints to stdout, and what went wrong: it is missing, it failed, or it took too long.
    The latter is empty where nothing did."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:g} s"
    except OSError as error:
        return "", error.strerror or str(error)
    output, errors = done.stdout.strip(), done.stderr.strip()
    if output and done.returncode == 0:
        return output, ""
    said = (output or errors).partition("\n")[0].strip()
    return output, said if said or done.returncode == 0 else f"exit code {done.returncode}"


def smi(*arguments: str) -> tuple[str, str]:
    """Runs nvidia-smi, wherever it is. Returns what `answer` does."""
    program = smi_program()
    return answer(program, *arguments) if program else ("", "not installed")


def smi_program() -> str | None:
    folders = [*os.environ.get("PATH", os.defpath).split(os.pathsep), *SMI_FOLDERS]
    return shutil.which("nvidia-smi", path=os.pathsep.join(folders))


def gpus() -> tuple[list[Gpu], str]:
    """All GPUs that the driver counts, in its order, including those that cannot be used, and what is wrong
    according to the driver or its tools. The latter is empty where there is no sign of a GPU. nvidia-smi is
    used where NVML does not answer."""
    known, wrong = _by_nvml()
    if known:
        return known, wrong
    known, wrong_too = _by_smi()
    return known, wrong_too if known else "; ".join(filter(None, (wrong, wrong_too)))


def free_bytes(uuid: str) -> int | None:
    """Bytes of a GPU's or slice's memory that no process holds. None if unknown."""
    with contextlib.suppress(ImportError):
        nvml = importlib.import_module("pynvml")
        with contextlib.suppress(nvml.NVMLError):  # no driver, or one that does not report it
            nvml.nvmlInit()
            return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).free)
    said = smi("-i", uuid, "--query-gpu=memory.free", "--format=csv,noheader,nounits")[0]
    return int(said) << 20 if said.isdigit() else None


def driver_trace(root: Path = Path("/")) -> str:
    """A file or library that shows that NVIDIA's driver is here, even in a container; else empty."""
    for place in ("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg", "proc/driver/nvidia"):
        if found := next(root.glob(place), None):
            return str(found)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    return "libcuda.so.1"


def _by_nvml() -> tuple[list[Gpu], str]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return [], ""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        is_absent = error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return [], "" if is_absent else f"NVML: {error}"
    known, wrong = [], []
    for index in range(count):
        try:
            known.append(_read(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
        except AttributeError as error:  # pynvml is too old
            return [], f"NVML: {error}"
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_FUNCTION_NOT_FOUND:  # the driver is too old
                return [], f"NVML: {error}"
            # A GPU that fell off the bus. The others work.
            wrong.append(f"NVML: GPU {index}: {error}")
            if error.value != nvml.NVML_ERROR_NO_PERMISSION:  # another job's: CUDA does not count it
                known.append(LOST)
    return known, "; ".join([*wrong, *_without_slices(known)]) or ("" if count else "NVML shows no GPU")


def _without_slices(known: Sequence[Gpu]) -> list[str]:
    return [
        f"GPU {index} is in MIG mode and has no slice for this process"
        for index, gpu in enumerate(known)
        if gpu.divided and not gpu.slices
    ]


def _read(nvml: ModuleType, handle: object) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
    gpu = Gpu(f"sm_{major}{minor}", name, _memory(nvml, handle), uuid)
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if divided else 0
    except nvml.NVMLError as error:
        return replace(gpu, divided=False) if error.value == nvml.NVML_ERROR_NOT_SUPPORTED else gpu
    except AttributeError:  # the library is older than MIG
        return gpu
    slices = []
    for index in range(most):
        try:
            slices.append(_slice(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index), gpu))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_FUNCTION_NOT_FOUND:  # the driver is too old to describe slices
                raise
            # Otherwise there is no slice of this number, or this container may not use it.
    return replace(gpu, divided=divided, slices=tuple(slices))


def _slice(nvml: ModuleType, handle: object, gpu: Gpu) -> Gpu:
    name = _text(nvml.nvmlDeviceGetName(handle))
    if " MIG " not in name:
        name = f"{gpu.name} MIG {_profile(nvml.nvmlDeviceGetAttributes(handle), gpu.memory)}"
    place = f"{nvml.nvmlDeviceGetGpuInstanceId(handle)}/{nvml.nvmlDeviceGetComputeInstanceId(handle)}"
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    return Gpu(gpu.arch, name, _memory(nvml, handle), uuid, f"MIG-{gpu.uuid}/{place}")


def _profile(attributes: object, memory: int) -> str:
    """The profile of a slice: `1g.10gb`, or `1c.3g.40gb` for a compute instance that is only a part of its
    GPU instance (NVIDIA's MIG User Guide, MIG Device Names). The size is counted in eighths of the GPU's GiB,
    both rounded up, as getMigMemorySizeGB of NVIDIA's go-nvlib does (pkg/nvlib/device/mig_profile.go).

    memory: bytes of the GPU; 0 if unknown
    """
    compute, whole, mebibytes = (
        getattr(attributes, field)
        for field in ("computeInstanceSliceCount", "gpuInstanceSliceCount", "memorySizeMB")
    )
    size = math.ceil(mebibytes / 1024)
    if memory:
        eighths = math.ceil(8 * (mebibytes << 20) / memory)
        size = math.floor(eighths / 8 * math.ceil(memory / (1 << 30)) + 0.5)
    return f"{f'{compute}c.' if compute != whole else ''}{whole}g.{size}gb"


def _memory(nvml: ModuleType, handle: object) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # the GPU shares the CPU's memory, as GB10 does
        return 0


def _text(value: str | bytes) -> str:
    """Older releases of the library return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _by_smi() -> tuple[list[Gpu], str]:
    if smi_program() is None:
        return [], ""
    output, wrong = _asked_smi("compute_cap,uuid,memory.total,mig.mode.current,name")
    if "not a valid field" in output + wrong:  # one from before MIG
        output, wrong = _asked_smi("compute_cap,uuid,memory.total,name")
    known, other = [], ""
    for line in output.splitlines():
        if row := re.fullmatch(SMI_ROW, line):
            major, minor, uuid, mebibytes, mode, name = ((cell or "").strip() for cell in row.groups())
            memory = int(mebibytes) << 20 if mebibytes.isdigit() else 0
            divided = MIG_MODES.get(mode)
            known.append(Gpu(f"sm_{major}{minor}", name, memory, uuid, divided=divided))
        else:  # a warning, or what it says of a GPU that fell off the bus
            other = other or line.strip()
    known, wrong = _with_slices(known), other or wrong or ("" if known else "it shows no GPU")
    said = [f"nvidia-smi: {wrong}"] if wrong else []
    return known, "; ".join(said + _without_slices(known))


def _asked_smi(fields: str) -> tuple[str, str]:
    return smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")


def _with_slices(known: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs with the slices, profiles and UUIDs that `nvidia-smi -L` lists under each."""
    slices: dict[str, list[Gpu]] = {gpu.uuid: [] for gpu in known}
    parent: Gpu | None = None
    for line in smi("-L")[0].splitlines():
        if row := re.match(r"GPU \d+: .*\(UUID: ([^)]+)\)", line):
            parent = next((gpu for gpu in known if gpu.uuid == row[1]), None)
        elif parent and (row := re.match(r"\s*MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)):
            size = re.search(r"(\d+)gb", row[1])
            memory = int(size[1]) * 10**9 if size else 0  # the profile rounds it up
            slices[parent.uuid].append(Gpu(parent.arch, f"{parent.name} MIG {row[1]}", memory, row[2]))
    return [replace(gpu, slices=tuple(slices[gpu.uuid])) for gpu in known]


def shown(known: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that CUDA shows this process, in the order in which torch numbers them. If any slices are
    visible, CUDA shows only the first one, and no whole GPU (NVIDIA's MIG User Guide, CUDA Device
    Enumeration). A slice that the driver's tools do not list has its own name and unknown memory."""
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    entry = (setting or "").split(",")[0].strip()
    if entry.startswith("MIG-"):
        return _named_slice(known, entry)
    chosen = [gpu for gpu in visible("cuda", known, lambda gpu: gpu.uuid, environment) if gpu.usable]
    slices = [part for gpu in chosen for part in gpu.slices]
    return slices[:1] or chosen


def _named_slice(known: Sequence[Gpu], entry: str) -> list[Gpu]:
    """The slice of this UUID, of a beginning of it that fits no other slice, or of this old name."""
    slices = [part for gpu in known for part in gpu.slices]
    wanted = entry.lower()
    fits = [p for p in slices if p.uuid.lower().startswith(wanted) or p.old_name.lower() == wanted]
    if fits:
        return fits if len(fits) == 1 else []
    parents = [gpu for gpu in known if gpu.usable and gpu.divided is not False]
    if old := re.match(r"mig-(gpu-[^/]+)/", wanted):
        parents = [gpu for gpu in parents if gpu.uuid.lower().startswith(old[1])]
    elif slices:
        return []
    if len(parents) == 1 and len(parents[0].slices) == 1:
        return list(parents[0].slices)
    if len({(gpu.arch, gpu.name) for gpu in parents}) != 1:
        return []  # it may belong to different kinds of GPUs
    return [Gpu(parents[0].arch, f"{parents[0].name} {entry}", 0, entry)]
