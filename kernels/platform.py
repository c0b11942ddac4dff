"""Which devices this machine has, and what is installed. Imports neither torch nor a GPU library."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform as host
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import gpus
from kernels.gpus import answer, visible
from kernels.support import Support, need
from shapes.toml import read_toml

if TYPE_CHECKING:
    import torch

BUILDS = {"cuda": "CUDA", "rocm": "ROCm", "cpu": "CPUs"}
KINDS = tuple(BUILDS)


@dataclass(frozen=True)
class Platform:
    """A device of this machine, or a kind of device that is only asked about."""

    kind: str
    arch: str
    """sm_90, gfx942, x86-amx ..."""
    device: str = "cpu"
    """torch's name of it, which is `cuda:0` on ROCm, too."""
    name: str = ""
    features: frozenset[str] = frozenset()
    """Instruction sets of a CPU, as /proc/cpuinfo names them."""
    memory: int = 0
    """Bytes of device memory, for a CPU of RAM that this process can use; 0 if unknown."""
    last_level: int = 0
    """Bytes of the last-level cache; 0 if unknown."""
    uuid: str = ""
    """The driver's identifier, which does not depend on how devices are numbered here."""
    here: bool = True
    """False for a platform that is only asked about. Its libraries are then unknown."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a worker compares with torch's device, to know whether it is this one."""
        return {"arch": self.arch, "name": self.name, "uuid": self.uuid, "memory": self.memory}

    def is_a(self, *kinds: str) -> Support:
        return need(self.kind in kinds, f"needs {' or '.join(kinds)}; this is {self.kind} {self.arch}")

    def has(self, *features: str) -> Support:
        """Whether the CPU has these instruction sets, named as in /proc/cpuinfo."""
        missing = [f for f in features if self.here and f not in self.features]
        return need(not missing, f"needs a CPU with {', '.join(missing)}")

    def library(self, module: str, *, install: str = "") -> Support:
        """Whether a module is installed here. install: says how to get it; by default as LIBRARIES has it"""
        install = install or LIBRARIES.get(module, {}).get("install", "")
        how = f"; {install}" if install else ""
        if self.here and (other := lookalike(module)):
            return need(False, f"the installed {module} is {other}{how}")
        if module == "torch" and version(module) and (wrong := self.other_build()):
            return need(False, wrong)
        return need(not self.here or version(module), f"{module} is not installed{how}")

    def other_build(self) -> str:
        """Says that the installed torch is built for other devices; empty where it is not."""
        build = torch_build() if self.here and self.device != "cpu" else ""
        if build in ("", self.kind):
            return ""
        built, wanted = BUILDS[build], BUILDS[self.kind]
        return f"torch {version('torch')} is built for {built}: {self.device} needs its build for {wanted}"

    def compiler(self) -> Support:
        """Whether there is what torch.compile generates code with."""
        if self.kind == "cpu":
            compilers = os.environ.get("CXX", "g++"), "clang++"
            return need(not self.here or any(map(shutil.which, compilers)), "needs a C++ compiler (g++)")
        return self.library("triton")


LIBRARIES: Mapping[str, Mapping[str, Any]] = read_toml(Path(__file__).with_name("libraries.toml"))
"""What is known of libraries, by module: libraries.toml says of its entries what they mean."""


def distributions(module: str) -> list[str]:
    """The names of the distributions that install a module."""
    return LIBRARIES.get(module, {}).get("distributions", [module])


def lookalike(module: str) -> str:
    """What an installed module is, if it is another one of the same name; else empty. Imports nothing."""
    facts = LIBRARIES.get(module, {})
    if "other" not in facts or (spec := importlib.util.find_spec(module)) is None:
        return ""
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any(next(folder.glob(file), None) for folder in folders for file in facts["files"]):
        return ""
    return f"{facts['other']} ({folders[0] if folders else spec.origin})"


@functools.cache
def version(module: str) -> str | None:
    """The installed version of the distribution that has a module, `unknown` where that does not tell. None
    where the module is not installed, or is another one of the same name. Imports nothing."""
    # find_spec of the whole name would import the packages around it. These may have parts in several folders
    # of Python's path (pkgutil.extend_path).
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    elsewhere = [str(Path(entry, package)) for entry in sys.path]
    for name in inside:
        folders = [*(spec.submodule_search_locations or ()), *elsewhere] if spec else []
        spec, elsewhere = importlib.machinery.PathFinder.find_spec(name, folders), []
    if spec is None or lookalike(module):
        return None
    for name in distributions(module):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


@functools.cache
def torch_build() -> str:
    """The kind of devices for which the installed torch is built; empty without torch. Imports nothing."""
    spec = importlib.util.find_spec("torch")
    try:
        text = (Path(spec.origin or "").parent / "version.py").read_text("utf-8") if spec else ""
    except OSError:
        return ""
    for kind, variable in (("rocm", "hip"), ("cuda", "cuda")):
        if re.search(rf"^{variable}\b[^=]*= *['\"]", text, re.MULTILINE):
            return kind
    return "cpu" if text else ""


def named(kind: str, arch: str = "") -> Platform:
    """A platform that is only asked about, as by `list --platform rocm --arch gfx942`."""
    return Platform(kind, arch or {"cuda": "sm_90", "rocm": "gfx942", "cpu": "x86-amx"}[kind], here=False)


def detect(device: str | None = None) -> Platform:
    """The platform of a device (`cpu`, `cuda`, `cuda:1`). By default it is the first GPU, or else the CPU.

    Raises LookupError, with one line that lists the devices.
    """
    if device == "cpu":
        return _cpu()
    known = devices()
    if device is None:
        return next(iter(known.values()))
    wanted = "cuda:0" if device == "cuda" else device
    if wanted not in known:
        why = f"; {unseen()}" if unseen() else ""
        here = (f"{p.device} ({p.name})" if p.name and p.kind != "cpu" else p.device for p in known.values())
        raise LookupError(f"no device {device!r}; devices here: {', '.join(here)}{why}")
    return known[wanted]


def of(device: torch.device) -> Platform:
    """The platform of a tensor's device, as torch describes it: that is faster than asking the driver."""
    if device.type == "cpu":
        return devices()["cpu"]
    import torch

    gpu = torch.cuda.get_device_properties(device)
    name = f"cuda:{device.index or 0}"
    if torch.version.hip:
        return Platform("rocm", gpu.gcnArchName.split(":")[0], name, gpu.name, memory=gpu.total_memory)
    return Platform("cuda", f"sm_{gpu.major}{gpu.minor}", name, gpu.name, memory=gpu.total_memory)


@functools.cache
def devices() -> dict[str, Platform]:
    """Platforms by torch's name of the device, GPUs first."""
    return {p.device: p for p in [*_gpus()[0], _cpu()]}


def unseen() -> str:
    """Why a GPU that seems to be here cannot be used, in one line; empty without a sign of a GPU."""
    return _gpus()[1]


def run(*command: str) -> str:
    """What a command prints; empty where it is missing, fails or hangs."""
    output, wrong = answer(*command)
    return "" if wrong else output


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
ALL_HIDDEN = frozenset({"", "-1", "NoDevFiles"})
"""Values of VISIBLE with which users, Ray and Slurm hide all GPUs."""


@functools.cache
def _gpus() -> tuple[list[Platform], str]:
    """The GPUs that this process may use, with torch's names, and why others here cannot be used."""
    known, wrong = gpus.nvidia_gpus()
    found = [
        Platform("cuda", gpu.arch, f"cuda:{index}", gpu.name, memory=gpu.memory, uuid=gpu.uuid)
        for index, gpu in enumerate(gpus.shown(known))
    ]
    count = len(known)
    if not known:
        found, count = _amd(), len(_kfd())
    settings = {variable: os.environ[variable] for variable in VISIBLE if variable in os.environ}
    names_slice = settings.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    if found and (found[0].memory or not names_slice):
        return found, wrong
    if not found and ALL_HIDDEN & {*settings.values()}:
        return [], ""
    if count and not found:
        said = " ".join(f"{variable}={value}" for variable, value in settings.items())
        none = f"{said} selects none of the GPUs here ({count})" if said else ""
        return [], "; ".join(filter(None, (none, wrong)))
    if found:
        name = settings["CUDA_VISIBLE_DEVICES"].split(",")[0]
        unknown = f"{name} has unknown memory, as nvidia-smi does not list it"
        return _by_torch(found, wrong or unknown)
    trace = gpus.driver_trace() or ("/dev/kfd" if Path("/dev/kfd").exists() else "")
    return _by_torch([], wrong or (f"{trace} is here, but no GPU is shown" if trace else ""))


def _by_torch(found: list[Platform], wrong: str) -> tuple[list[Platform], str]:
    """The GPUs as torch describes them, where the driver's own tools do not (`wrong` says why). torch is
    imported in another process, as that takes seconds, and only where there is a sign of a GPU. found: what
    is known without it."""
    build = torch_build()
    torch_here = f"torch {version('torch')} is built for {BUILDS.get(build, '')}"
    if not wrong:
        return [], f"{torch_here}, but no driver for that is here" if build in ("cuda", "rocm") else ""
    if build not in ("cuda", "rocm"):
        return found, f"{wrong}; {torch_here if build else 'torch is not installed'}"
    output, why = answer(sys.executable, "-c", ASK_TORCH, timeout_s=TORCH_S)
    if why:
        return found, f"{wrong}; torch: {why}"
    return [
        Platform(build, arch, f"cuda:{index}", name, memory=memory, uuid=uuid)
        for index, (arch, name, memory, uuid) in enumerate(json.loads(output.splitlines()[-1]))
    ], ""


TORCH_S = 120.0
ASK_TORCH = """
import json, os
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
try:
    import torch
    torch.cuda.init()
except Exception as error:
    print(" ".join(str(error).split()))
    raise SystemExit(1)
def facts(gpu):
    arch = gpu.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
    uuid = getattr(gpu, "uuid", "") if torch.version.cuda else ""
    kind = "MIG" if " MIG " in gpu.name else "GPU"
    return arch, gpu.name, gpu.total_memory, f"{kind}-{uuid}" if uuid else ""
print(json.dumps([facts(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]))
"""


INSTINCT = read_toml(Path(__file__).with_name("instinct.toml"))
PARTS = {2: "DPX", 3: "TPX", 4: "QPX"}

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
PCI = Path("/sys/bus/pci/devices")


def _amd(root: Path = NODES, pci: Path = PCI) -> list[Platform]:
    """The AMD GPUs that this process may use, with torch's names."""
    left = visible("rocm", _kfd(root, pci), lambda gpu: gpu.uuid)
    return [replace(gpu, device=f"cuda:{index}") for index, gpu in enumerate(left)]


def _kfd(root: Path = NODES, pci: Path = PCI) -> list[Platform]:
    """The GPUs, or parts of partitioned GPUs (DPX to CPX), that AMD's kernel driver shows this process."""
    nodes: list[tuple[Path, dict[str, str]]] = []
    for node in sorted(root.glob("*"), key=lambda p: int(p.name)):
        # EPERM: this container may not use the GPU. ROCm does not count it either.
        with contextlib.suppress(OSError):
            lines = (node / "properties").read_text("utf-8").splitlines()
            nodes.append((node, dict(line.split(None, 1) for line in lines)))
    ids = [facts.get("unique_id") for _, facts in nodes]
    return [
        _kfd_gpu(node, facts, pci, ids.count(facts.get("unique_id")) == 1)
        for node, facts in nodes
        if int(facts.get("gfx_target_version", 0))
    ]


def _kfd_gpu(node: Path, facts: dict[str, str], pci: Path, has_own_id: bool) -> Platform:
    """facts: the properties of a node; has_own_id: whether no other node has its unique_id."""
    version_number = int(facts["gfx_target_version"])
    major, minor, step = version_number // 10000, version_number // 100 % 100, version_number % 100
    memory = sum(
        int(size)
        for bank in node.glob("mem_banks/*/properties")
        for size in re.findall(r"size_in_bytes (\d+)", bank.read_text("utf-8"))
    )
    # ROCm reports the last-level (Infinity) cache of the package. torch knows only the L2.
    caches = [
        int(size) << 10
        for cache in node.glob("caches/*/properties")
        if re.search(r"level 3\b", text := cache.read_text("utf-8"))
        for size in re.findall(r"size (\d+)", text)
    ]
    product = INSTINCT["products"].get(f"{int(facts.get('device_id', 0)):x}", "")
    place, domain = int(facts.get("location_id", 0)), int(facts.get("domain", 0))
    part = _part(pci, domain, place, product, int(facts.get("num_xcc", 0)))
    name = (node / "name").read_text("utf-8").strip() if (node / "name").exists() else ""
    if product:
        name = f"AMD Instinct {product}"
    if part:
        name = f"{name} {part}"
    # ROCm's identifier, which ROCR_VISIBLE_DEVICES takes. A virtual function has none, and with older drivers
    # all parts of a GPU have the same one, which ROCr then does not accept. So the PCI address and the number
    # of the node tell these apart.
    unique = int(facts.get("unique_id", 0))
    if unique and (has_own_id or not part):
        uuid = f"GPU-{unique:016x}"
    else:
        uuid = f"pci-{domain:04x}:{place:04x}"
        if part:
            uuid += f"-{node.name}"
    arch = f"gfx{major}{minor:x}{step:x}"
    return Platform("rocm", arch, name=name, memory=memory, last_level=max(caches, default=0), uuid=uuid)


def _part(pci: Path, domain: int, place: int, product: str, dies: int) -> str:
    """The name of a part of a GPU: its compute partition, and its memory partition if known (`CPX/NPS4`).
    Empty for a whole GPU.

    place: the driver's location_id, whose lowest 16 bits are bus, device and function
    dies:  how many dies the part has
    """
    bus = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
    told = {"compute": "", "memory": ""}
    for kind in told:
        with contextlib.suppress(OSError):
            told[kind] = (pci / bus / f"current_{kind}_partition").read_text("utf-8").strip()
    whole = next((count for name, count in INSTINCT["dies"].items() if product.startswith(name)), 0)
    if not told["compute"] and 0 < dies < whole:
        told["compute"] = "CPX" if dies == 1 else PARTS.get(whole // dies, f"{dies} of {whole} XCC")
    if told["compute"] in ("", "SPX", "UNKNOWN"):
        return ""
    return "/".join(filter(None, told.values()))


@functools.cache
def _cpu() -> Platform:
    info = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    arch, name, features = _cpu_facts(info, host.machine())
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Platform("cpu", arch, "cpu", name, features, available_memory(), _cpu_last_level(ours))


def _cpu_facts(info: str, machine: str) -> tuple[str, str, frozenset[str]]:
    """Architecture, name and instruction sets, from the text of /proc/cpuinfo and uname's machine."""
    facts: dict[str, str] = {}
    for line in info.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())  # of the first CPU, though there may be several kinds
    features = frozenset((facts.get("flags") or facts.get("Features", "")).split())
    arch = machine
    if machine in ("x86_64", "AMD64"):
        levels = (("amx_bf16", "x86-amx"), ("avx512f", "x86-avx512"), ("avx2", "x86-avx2"))
        arch = next((arch for flag, arch in levels if flag in features), "x86")
    # On arm64 Linux names no model, but the implementer (0x41: Arm, 0xc0: Ampere) and the part.
    part = " ".join(facts[key] for key in ("CPU implementer", "CPU part") if key in facts)
    name = facts.get("model name") or (f"{machine} {part}" if part else host.processor() or machine)
    return arch, name, features


def free_memory(platform: Platform, root: Path = Path("/")) -> int | None:
    """Bytes of a GPU's memory that no process holds, or all of them where the driver does not report that; of
    a CPU `available_memory`. None if unknown."""
    if platform.kind == "cpu":
        return available_memory(root)
    free = None
    if platform.kind == "cuda" and platform.here and platform.uuid:
        free = gpus.free_bytes(platform.uuid)
    amd = platform.kind == "rocm" and platform.here
    for device in root.glob("sys/class/drm/card*/device") if amd else ():
        with contextlib.suppress(OSError, ValueError):
            if f"GPU-{(device / 'unique_id').read_bytes().decode().strip()}" == platform.uuid:
                used = int((device / "mem_info_vram_used").read_text("utf-8"))
                free = platform.memory - used
    return platform.memory or None if free is None else free


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process can still use: what is free on the machine, and within its control
    groups. Page cache counts as free."""
    info = root / "proc/meminfo"
    text = info.read_bytes() if info.exists() else b""
    match = re.search(rb"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    free = int(match.group(1)) << 10 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([free, *(left for folder in _memory_groups(root) for left in _left(folder))]))


def _memory_groups(root: Path) -> list[Path]:
    """The folders of this process's control group for memory, and of the groups around it. For CPU time
    harness.machine.cpu_threads does the same: workers use that beside kernels of older commits."""
    try:
        groups = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        groups = []
    folders: list[Path] = []
    for group in [*groups, "0::/", "0:memory:/"]:
        _, controllers, path = group.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # In a container the mount's root is our own group, and `path` may be the path outside of it.
        mount = root / "sys/fs/cgroup" / controllers
        inner = mount / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]
    return folders


LIMITS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""For control groups of version 2 and 1: the file of the limit, which has `max` or a huge number where there
is none; the file of the use; and the entries of memory.stat that are page cache, including inner groups."""


def _left(folder: Path) -> Iterator[int]:
    """Bytes that a control group's limit leaves; nothing where it has no limit."""
    for limit, used, cached in LIMITS:
        with contextlib.suppress(OSError):
            ceiling = (folder / limit).read_text("utf-8").strip()
            if not ceiling.isdigit():
                continue
            taken = int((folder / used).read_text("utf-8"))
            cache = 0
            with contextlib.suppress(OSError):
                lines = (line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
                cache = sum(int(size) for name, size in lines if name in cached)
            # The counters are updated in batches, so a use of less than a MiB counts as none.
            yield int(ceiling) - (max(0, taken - cache) >> 20 << 20)


def _cpu_last_level(cpus: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the last-level caches of these CPUs together: a chip of several dies has one on each die."""
    caches: dict[tuple[str, str], tuple[int, int]] = {}
    for index in (index for cpu in cpus for index in root.glob(f"cpu{cpu}/cache/index*")):
        with contextlib.suppress(OSError):
            level, kind, size = ((index / of).read_text("utf-8").strip() for of in ("level", "type", "size"))
            shared = (index / "shared_cpu_list").read_text("utf-8").strip()
            if kind != "Instruction":
                caches[level, shared] = (int(level), int(size.removesuffix("K")) << 10)
    last = max((level for level, _ in caches.values()), default=0)
    return sum(size for level, size in caches.values() if level == last)
