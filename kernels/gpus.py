"""The NVIDIA GPUs of this machine and their MIG slices, as nvidia-smi reports them; and which GPUs, of any
vendor, CUDA_VISIBLE_DEVICES and similar variables select and renumber."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

NOT_INSTALLED = "not installed"

SMI_FOLDERS = ("/usr/local/nvidia/bin", "/usr/bin")
"""Where containers have nvidia-smi, besides PATH."""

MIG_MODES = {"Enabled": True, "Disabled": False, "[N/A]": False}
SMI_ROW = r"\s*(\d+)\.(\d+)\s*,\s*(GPU-[^,\s]+)\s*,([^,]*),(?:\s*(Enabled|Disabled|\[N/A\])\s*,)?(.*)"
"""A line of nvidia-smi's answer to `nvidia_gpus`. Older versions leave out the MIG mode."""

ANSWER_S = 30.0
"""The seconds that nvidia-smi may take. Without persistence mode it has to start every GPU."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG slice of one."""

    arch: str
    name: str
    """The vendor's name. That of a slice ends in `MIG 1g.10gb`."""
    memory: int
    """Bytes; 0 if unknown, as of a GPU that shares the CPU's memory. Those of a slice are the decimal GB of
    its profile, a few percent less than the slice has."""
    uuid: str
    divided: bool | None = None
    """Whether the GPU is in MIG mode; None if unknown."""
    slices: tuple[Gpu, ...] = ()


def answer(*command: str, timeout_s: float = ANSWER_S) -> tuple[str, str]:
    """What a command prints to stdout, and its error: it is missing, failed or took too long; else empty."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:g} s"
    except OSError as error:
        return "", error.strerror or str(error)
    output, errors = done.stdout.strip(), done.stderr.strip()
    if output and done.returncode == 0:
        return output, ""
    first_line = (output or errors).partition("\n")[0].strip()
    if not first_line and done.returncode != 0:
        first_line = f"exit code {done.returncode}"
    return output, first_line


def smi(*arguments: str) -> tuple[str, str]:
    """Runs nvidia-smi, wherever it is. Returns what `answer` does."""
    folders = [*os.environ.get("PATH", os.defpath).split(os.pathsep), *SMI_FOLDERS]
    program = shutil.which("nvidia-smi", path=os.pathsep.join(folders))
    return answer(program, *arguments) if program else ("", NOT_INSTALLED)


def nvidia_gpus() -> tuple[list[Gpu], str]:
    """All GPUs that nvidia-smi shows, in the driver's order, including those that cannot be used; and in one
    line what is wrong with them or with nvidia-smi; empty where nothing is wrong or it is not installed."""
    fields = "compute_cap,uuid,memory.total,mig.mode.current,name"
    output, error = smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if error == NOT_INSTALLED:
        return [], ""
    known, warning = [], ""
    for line in output.splitlines():
        if row := re.fullmatch(SMI_ROW, line):
            major, minor, uuid, mebibytes, mode, name = ((cell or "").strip() for cell in row.groups())
            memory = int(mebibytes) << 20 if mebibytes.isdigit() else 0
            known.append(Gpu(f"sm_{major}{minor}", name, memory, uuid, divided=MIG_MODES.get(mode)))
        else:  # a GPU that fell off the bus has such a line, too
            warning = warning or line.strip()
    if any(gpu.divided for gpu in known):
        known = _with_slices(known)
    wrong = warning or error
    if not wrong and not known:
        wrong = "it shows no GPU"
    texts = [f"nvidia-smi: {wrong}"] if wrong else []
    for index, gpu in enumerate(known):
        if gpu.divided and not gpu.slices:
            texts.append(f"GPU {index} is in MIG mode and has no slice for this process")
    return known, "; ".join(texts)


def free_bytes(uuid: str) -> int | None:
    """Bytes of a GPU's memory that no process holds. None if unknown, as for a slice."""
    mebibytes, _ = smi("-i", uuid, "--query-gpu=memory.free", "--format=csv,noheader,nounits")
    return int(mebibytes) << 20 if mebibytes.isdigit() else None


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


def _with_slices(known: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs with the slices, profiles and UUIDs that `nvidia-smi -L` lists under each."""
    slices: dict[str, list[Gpu]] = {gpu.uuid: [] for gpu in known}
    parent: Gpu | None = None
    for line in smi("-L")[0].splitlines():
        if row := re.match(r"GPU \d+: .*\(UUID: ([^)]+)\)", line):
            parent = next((gpu for gpu in known if gpu.uuid == row[1]), None)
        elif parent and (row := re.match(r"\s*MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)):
            size = re.search(r"(\d+)gb", row[1])
            memory = int(size[1]) * 10**9 if size else 0  # of the profile's name: see Gpu.memory
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
    chosen = visible("cuda", known, lambda gpu: gpu.uuid, environment)
    slices = [part for gpu in chosen for part in gpu.slices]
    return slices[:1] or [gpu for gpu in chosen if not gpu.divided]


def _named_slice(known: Sequence[Gpu], entry: str) -> list[Gpu]:
    """The slice of this UUID, or of a beginning of it that fits no other slice. Where nvidia-smi lists no
    slice at all, it is one of unknown memory, if all GPUs that may have it are of one kind."""
    if slices := [part for gpu in known for part in gpu.slices]:
        fits = [part for part in slices if part.uuid.lower().startswith(entry.lower())]
        return fits if len(fits) == 1 else []
    parents = [gpu for gpu in known if gpu.divided is not False]
    if len({(gpu.arch, gpu.name) for gpu in parents}) != 1:
        return []
    return [Gpu(parents[0].arch, f"{parents[0].name} {entry}", 0, entry)]


# Variables that select devices

VARIABLES = {
    "cuda": (("CUDA_VISIBLE_DEVICES",),),
    "rocm": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}
"""Groups of variables, which apply one after the other. In a group only the first that is set applies."""


def visible(
    kind: str, devices: Sequence[T], name: Callable[[T], str], environment: Mapping[str, str] = os.environ
) -> list[T]:
    """The devices that the environment selects, in the order in which torch numbers them.
    devices: all, in the driver's order; name: returns the driver's identifier of one"""
    for variables in VARIABLES[kind]:
        variable = next((variable for variable in variables if variable in environment), None)
        if variable is not None:
            names = [name(device).lower() for device in devices]
            numbers = _chosen(names, environment[variable], variable == "ROCR_VISIBLE_DEVICES")
            devices = [devices[number] for number in numbers]
    return list(devices)


def _chosen(names: Sequence[str], setting: str, is_rocr: bool) -> list[int]:
    """The numbers of the devices that a setting selects, by numbers or by beginnings of names. An entry that
    fits no device, or several, ends the list. If a device is listed twice, torch takes none at all
    (torch.cuda._parse_visible_devices), and ROCr ends the list there (RvdFilter::BuildUsrDeviceList)."""
    chosen: list[int] = []
    for entry in (part.strip().lower() for part in setting.split(",")):
        if entry.isdigit():
            fits = [int(entry)] if int(entry) < len(names) else []
        else:
            fits = [number for number, name in enumerate(names) if entry and name.startswith(entry)]
        if len(fits) != 1:
            break
        (number,) = fits
        if number in chosen:
            return chosen if is_rocr else []
        chosen.append(number)
    return chosen
