"""Which devices this machine has, and what is installed. Imports no GPU library, and torch only in `of`."""

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
from typing import Any

from kernels import gpus
from kernels.gpus import answer, visible
from kernels.lazy import torch
from kernels.support import Support, need
from shapes.toml import read_toml

BUILDS = {"cuda": "CUDA", "rocm": "ROCm", "cpu": "CPUs"}
"""What a build of torch for a kind of platform is called."""
KINDS = tuple(BUILDS)


@dataclass(frozen=True)
class Platform:
    """A device of this machine, or a kind of device that is only asked about."""

    kind: str
    """One of KINDS."""
    arch: str
    """sm_90, gfx942, x86-amx ..."""
    device: str = "cpu"
    """torch's name of it, such as `cuda:0`, on ROCm as well."""
    name: str = ""
    """The vendor's name of the product; empty if unknown."""
    features: frozenset[str] = frozenset()
    """Instruction sets of a CPU, as /proc/cpuinfo names them."""
    memory: int = 0
    """Bytes of a GPU's memory, or of the RAM that this process can use; 0 if unknown."""
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
        """Whether the CPU has these instruction sets, as in /proc/cpuinfo. Yes for one that is not here."""
        missing = [feature for feature in features if feature not in self.features]
        return need(not self.here or not missing, f"needs a CPU with {', '.join(missing)}")

    def library(self, module: str, *, install: str = "") -> Support:
        """Whether a module of this name is installed here and is the one that rows mean. Yes for a platform
        that is not here. Nothing is imported. install: says how to get it, by default as LIBRARIES does"""
        if not self.here:
            return Support(True)
        install = install or LIBRARIES.get(module, {}).get("install", "")
        how = f"; {install}" if install else ""
        other_package = lookalike(module)
        if other_package:
            return Support(False, f"the installed {module} is {other_package}{how}")
        if not version(module):
            return Support(False, f"{module} is not installed{how}")
        wrong_build = self.other_build() if module == "torch" else ""
        return need(not wrong_build, wrong_build)

    def other_build(self) -> str:
        """Says that the installed torch is built for another kind of device; empty where it is not."""
        build = torch_build() if self.here and self.device != "cpu" else ""
        if build in ("", self.kind):
            return ""
        built, needed = BUILDS[build], BUILDS[self.kind]
        return f"torch {version('torch')} is built for {built}: {self.device} needs its build for {needed}"

    def compiler(self) -> Support:
        """Whether there is what torch.compile needs: a C++ compiler for a CPU, Triton for a GPU."""
        if self.kind != "cpu":
            return self.library("triton")
        compilers = os.environ.get("CXX", "g++"), "clang++"
        return need(not self.here or any(map(shutil.which, compilers)), "needs a C++ compiler (g++)")


LIBRARIES: Mapping[str, Mapping[str, Any]] = read_toml(Path(__file__).with_name("libraries.toml"))
"""What is known of libraries, by module. The head of libraries.toml explains the entries."""


def distributions(module: str) -> list[str]:
    return LIBRARIES.get(module, {}).get("distributions", [module])


def lookalike(module: str) -> str:
    """Which other package is installed under this module's name, and where; or empty. Imports nothing."""
    facts = LIBRARIES.get(module, {})
    spec = importlib.util.find_spec(module) if "other" in facts else None
    if spec is None:
        return ""
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    # `files`: the library has at least one of these, the other package has none.
    if any(any(folder.glob(file)) for folder in folders for file in facts["files"]):
        return ""
    return f"{facts['other']} ({folders[0] if folders else spec.origin})"


@functools.cache
def version(module: str) -> str | None:
    """The version of the installed distribution that has a module; `unknown` where no distribution of it is
    recorded as installed. None without the module, or where it is a `lookalike`. Imports nothing."""
    # find_spec of a dotted name would import the packages around the module. So each part is looked for in
    # the folders of the part before it. The outermost package may add folders of Python's path to its own
    # when it is imported (pkgutil.extend_path). So its modules are looked for in all that have its name.
    package, *inner_names = module.split(".")
    spec = importlib.util.find_spec(package)
    further_folders = [str(Path(entry, package)) for entry in sys.path]
    for name in inner_names:
        if spec is None:
            return None
        folders = [*(spec.submodule_search_locations or ()), *further_folders]
        spec = importlib.machinery.PathFinder.find_spec(name, folders)
        further_folders = []
    if spec is None or lookalike(module):
        return None
    for name in distributions(module):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


@functools.cache
def torch_build() -> str:
    """The kind of platform for which the installed torch is built; empty without torch. Imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return ""
    try:
        text = (Path(spec.origin or "").parent / "version.py").read_text("utf-8")
    except OSError:
        return ""
    # torch/version.py sets `hip` or `cuda` to a version, or both to None.
    for kind, variable in (("rocm", "hip"), ("cuda", "cuda")):
        if re.search(rf"^{variable}\b[^=]*= *['\"]", text, re.MULTILINE):
            return kind
    return "cpu" if text else ""


def named(kind: str, arch: str = "") -> Platform:
    """A platform that is only asked about, as by `list --platform rocm`. arch: by default the usual one"""
    usual_archs = {"cuda": "sm_90", "rocm": "gfx942", "cpu": "x86-amx"}
    return Platform(kind, arch or usual_archs[kind], here=False)


def detect(device: str | None = None) -> Platform:
    """The platform of a device (`cpu`, `cuda`, `cuda:1`), by default the first GPU, or else the CPU. Raises
    LookupError, with one line that lists the devices."""
    if device == "cpu":
        return _cpu()
    by_name = devices()
    name = "cuda:0" if device == "cuda" else device
    if name is None:
        name = next(iter(by_name))
    if name not in by_name:
        why = f"; {unseen()}" if unseen() else ""
        here = [
            f"{p.device} ({p.name})" if p.name and p.kind != "cpu" else p.device for p in by_name.values()
        ]
        raise LookupError(f"no device {device!r}; devices here: {', '.join(here)}{why}")
    return by_name[name]


def of(device: torch.device) -> Platform:
    """The platform of a tensor's device, as torch describes it, which is faster than asking the driver."""
    if device.type == "cpu":
        return devices()["cpu"]
    gpu = torch.cuda.get_device_properties(device)
    kind, arch = "cuda", f"sm_{gpu.major}{gpu.minor}"
    if torch.version.hip:
        kind, arch = "rocm", gpu.gcnArchName.split(":")[0]
    return Platform(kind, arch, f"cuda:{device.index or 0}", gpu.name, memory=gpu.total_memory)


@functools.cache
def devices() -> dict[str, Platform]:
    """Platforms by torch's name of the device, GPUs first."""
    usable, _ = _gpus()
    return {platform.device: platform for platform in [*usable, _cpu()]}


def unseen() -> str:
    """Why a GPU that seems to be here cannot be used, in one line; empty without a sign of a GPU."""
    _, why = _gpus()
    return why


def run(*command: str) -> str:
    """What a command prints; empty where it is missing, fails or hangs."""
    output, error = answer(*command)
    return "" if error else output


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that select GPUs: those of gpus.VARIABLES, for all kinds of platforms."""
ALL_HIDDEN = frozenset({"", "-1", "NoDevFiles"})
"""Values of VISIBLE with which users, Ray and Slurm hide all GPUs."""


@functools.cache
def _gpus() -> tuple[list[Platform], str]:
    """The GPUs that this process may use, and in one line why others here cannot be used."""
    nvidia, smi_error = gpus.nvidia_gpus()
    if nvidia:
        usable = [
            Platform("cuda", gpu.arch, f"cuda:{index}", gpu.name, memory=gpu.memory, uuid=gpu.uuid)
            for index, gpu in enumerate(gpus.shown(nvidia))
        ]
        count = len(nvidia)
    else:
        usable = _amd()
        count = len(_kfd())
    settings = {variable: os.environ[variable] for variable in VISIBLE if variable in os.environ}
    if usable:
        # nvidia-smi may not list the slice that the variable names. Then its memory is unknown: torch tells.
        named_slice = settings.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        if usable[0].memory or not named_slice.startswith("MIG-"):
            return usable, smi_error
        unlisted = f"{named_slice} has unknown memory, as nvidia-smi does not list it"
        return _by_torch(usable, smi_error or unlisted)
    if not ALL_HIDDEN.isdisjoint(settings.values()):
        return [], ""
    if count:
        reasons = [smi_error] if smi_error else []
        if settings:
            setting = " ".join(f"{variable}={value}" for variable, value in settings.items())
            reasons.insert(0, f"{setting} selects none of the GPUs here ({count})")
        return [], "; ".join(reasons)
    trace = gpus.driver_trace() or ("/dev/kfd" if Path("/dev/kfd").exists() else "")
    not_shown = f"{trace} is here, but no GPU is shown" if trace else ""
    return _by_torch([], smi_error or not_shown)


def _by_torch(listed: list[Platform], sign: str) -> tuple[list[Platform], str]:
    """Asks torch for the GPUs, where the driver's own tools do not describe them. Another process imports
    torch, as that takes seconds. Returns what `_gpus` does.

    listed: the GPUs that are known without torch. They are returned where torch cannot tell
    sign:   what shows that there is a GPU, for the user; empty if nothing does: then torch is not asked
    """
    build = torch_build()
    is_for_gpus = build in ("cuda", "rocm")
    facts = f"torch {version('torch')} is built for {BUILDS[build]}" if build else "torch is not installed"
    if not sign:
        return [], f"{facts}, but no driver for that is here" if is_for_gpus else ""
    if not is_for_gpus:
        return listed, f"{sign}; {facts}"
    output, torch_error = answer(sys.executable, "-c", ASK_TORCH, timeout_s=TORCH_S)
    if torch_error:
        return listed, f"{sign}; torch: {torch_error}"
    described = json.loads(output.splitlines()[-1])  # importing torch may print lines before it
    return [
        Platform(build, arch, f"cuda:{index}", name, memory=memory, uuid=uuid)
        for index, (arch, name, memory, uuid) in enumerate(described)
    ], ""


TORCH_S = 120.0
"""The most seconds that ASK_TORCH may take."""
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
"""Products and dies of AMD's GPUs."""
PARTITIONS = {2: "DPX", 3: "TPX", 4: "QPX"}
"""AMD's name of a compute partition, by the number of parts that it makes of a GPU."""

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""Has a folder for each GPU, or part of one, and each CPU that AMD's kernel driver (KFD) knows."""
PCI = Path("/sys/bus/pci/devices")


def _amd(nodes: Path = NODES, pci: Path = PCI) -> list[Platform]:
    """The AMD GPUs that this process may use, with torch's names."""
    usable = visible("rocm", _kfd(nodes, pci), lambda gpu: gpu.uuid)
    return [replace(gpu, device=f"cuda:{index}") for index, gpu in enumerate(usable)]


def _kfd(root: Path = NODES, pci: Path = PCI) -> list[Platform]:
    """The GPUs, or parts of partitioned GPUs (DPX to CPX), that AMD's kernel driver shows this process."""
    nodes: list[tuple[Path, dict[str, str]]] = []
    for node in sorted(root.glob("*"), key=lambda p: int(p.name)):
        # EPERM: this container may not use the GPU. ROCm does not count it either.
        with contextlib.suppress(OSError):
            lines = (node / "properties").read_text("utf-8").splitlines()
            nodes.append((node, dict(line.split(None, 1) for line in lines)))
    ids = [properties.get("unique_id") for _, properties in nodes]
    return [
        _kfd_gpu(node, properties, pci, ids.count(properties.get("unique_id")) == 1)
        for node, properties in nodes
        if int(properties.get("gfx_target_version", 0))  # a CPU has 0
    ]


def _kfd_gpu(node: Path, properties: dict[str, str], pci: Path, has_own_id: bool) -> Platform:
    """The GPU of a node. has_own_id: whether no other node has its unique_id"""
    gfx_version = int(properties["gfx_target_version"])  # 90402 for gfx942
    major, minor, step = gfx_version // 10000, gfx_version // 100 % 100, gfx_version % 100
    banks, caches = _texts_in(node, "mem_banks"), _texts_in(node, "caches")
    memory = sum(int(size) for text in banks for size in re.findall(r"size_in_bytes (\d+)", text))
    # ROCm reports the last-level (Infinity) cache of the package, in KiB. torch knows only the L2.
    of_level_3 = [text for text in caches if re.search(r"level 3\b", text)]
    sizes_kib = [int(size) for text in of_level_3 for size in re.findall(r"size (\d+)", text)]
    product = INSTINCT["products"].get(f"{int(properties.get('device_id', 0)):x}", "")
    location, domain = int(properties.get("location_id", 0)), int(properties.get("domain", 0))
    part = _part(pci, domain, location, product, int(properties.get("num_xcc", 0)))
    name = f"AMD Instinct {product}"
    if not product:
        name = (node / "name").read_text("utf-8").strip() if (node / "name").exists() else ""
    # ROCm's identifier, which ROCR_VISIBLE_DEVICES takes. A virtual function has none. With older drivers all
    # parts of a GPU have the same one, which ROCr does not accept. PCI address and node tell these apart.
    uuid = f"pci-{domain:04x}:{location:04x}" + (f"-{node.name}" if part else "")
    unique_id = int(properties.get("unique_id", 0))
    if unique_id and (has_own_id or not part):
        uuid = f"GPU-{unique_id:016x}"
    return Platform(
        "rocm",
        f"gfx{major}{minor:x}{step:x}",
        name=f"{name} {part}" if part else name,
        memory=memory,
        last_level=max(sizes_kib, default=0) << 10,
        uuid=uuid,
    )


def _texts_in(node: Path, folder: str) -> list[str]:
    """The texts of the property files of a node's memory banks or caches."""
    return [file.read_text("utf-8") for file in node.glob(f"{folder}/*/properties")]


def _part(pci: Path, domain: int, location: int, product: str, dies: int) -> str:
    """The name of a part of a GPU: its compute partition, and its memory partition if known (`CPX/NPS4`).
    Empty for a whole GPU.
    location: the driver's location_id, whose lowest 16 bits are bus, device and function; dies: how many
    accelerator dies (XCC) the part has, 0 if unknown"""
    address = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
    partitions = {"compute": "", "memory": ""}
    for kind in partitions:
        with contextlib.suppress(OSError):
            partitions[kind] = (pci / address / f"current_{kind}_partition").read_text("utf-8").strip()
    all_dies = next((count for start, count in INSTINCT["dies"].items() if product.startswith(start)), 0)
    if not partitions["compute"] and 0 < dies < all_dies:
        by_count = PARTITIONS.get(all_dies // dies, f"{dies} of {all_dies} XCC")
        partitions["compute"] = "CPX" if dies == 1 else by_count
    if partitions["compute"] in ("", "SPX", "UNKNOWN"):  # SPX: one part
        return ""
    return "/".join(filter(None, partitions.values()))


@functools.cache
def _cpu() -> Platform:
    info = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    arch, name, features = _cpu_facts(info, host.machine())
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Platform("cpu", arch, "cpu", name, features, available_memory(), _cpu_last_level(allowed))


def _cpu_facts(info: str, machine: str) -> tuple[str, str, frozenset[str]]:
    """Architecture, name and instruction sets, from the text of /proc/cpuinfo and uname's machine."""
    facts: dict[str, str] = {}
    for line in info.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())  # of the first CPU, though there may be several kinds
    features = frozenset(facts.get("flags", facts.get("Features", "")).split())  # on x86, on arm64
    arch = machine
    if machine in ("x86_64", "AMD64"):
        best_first = (("amx_bf16", "x86-amx"), ("avx512f", "x86-avx512"), ("avx2", "x86-avx2"))
        arch = next((arch for flag, arch in best_first if flag in features), "x86")
    # On arm64 Linux names no model, but the implementer (0x41: Arm, 0xc0: Ampere) and the part.
    part = " ".join(facts[key] for key in ("CPU implementer", "CPU part") if key in facts)
    name = facts.get("model name") or (f"{machine} {part}" if part else host.processor() or machine)
    return arch, name, features


def free_memory(platform: Platform, root: Path = Path("/")) -> int | None:
    """Bytes of a GPU's memory that no process holds, or of the whole memory where the driver does not report
    that. For a CPU it is `available_memory`. None if unknown."""
    if platform.kind == "cpu":
        return available_memory(root)
    free = None
    if platform.kind == "cuda" and platform.here and platform.uuid:
        free = gpus.free_bytes(platform.uuid)
    elif platform.kind == "rocm" and platform.here:
        for device in root.glob("sys/class/drm/card*/device"):
            with contextlib.suppress(OSError, ValueError):
                if f"GPU-{(device / 'unique_id').read_bytes().decode().strip()}" == platform.uuid:
                    free = platform.memory - int((device / "mem_info_vram_used").read_text("utf-8"))
    if free is None:
        free = platform.memory or None
    return free


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process can still use: free memory and page cache within its control groups."""
    info = root / "proc/meminfo"
    text = info.read_bytes() if info.exists() else b""
    match = re.search(rb"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    free = int(match[1]) << 10 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _memory_groups(root):
        free = min([free, *_left_bytes(folder)])
    return max(0, free)


def _memory_groups(root: Path) -> list[Path]:
    """The folders of this process's control group for memory, and of the groups around it.

    harness.machine.cpu_threads finds the groups for CPU time in the same way. It does not call this function,
    because workers use it beside kernels of older commits.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        groups = []
    folders: list[Path] = []
    for group in [*groups, "0::/", "0:memory:/"]:  # the last two: the mounts' roots, of versions 2 and 1
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


def _left_bytes(folder: Path) -> Iterator[int]:
    """Bytes that a control group's limit leaves; nothing where it has no limit."""
    for limit_file, use_file, cache_entries in LIMITS:
        with contextlib.suppress(OSError):
            limit = (folder / limit_file).read_text("utf-8").strip()
            if not limit.isdigit():
                continue
            used = int((folder / use_file).read_text("utf-8"))
            with contextlib.suppress(OSError):
                for line in (folder / "memory.stat").read_text("utf-8").splitlines():
                    entry, size = line.split()
                    if entry in cache_entries:
                        used -= int(size)
            # The counters are updated in batches, so a use of less than a MiB counts as none.
            yield int(limit) - (max(0, used) >> 20 << 20)


def _cpu_last_level(cpus: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the last-level caches of these CPUs together: a chip of several dies has one on each die."""
    caches: dict[tuple[int, str], int] = {}  # (level, the CPUs that share it) -> bytes
    for cpu in cpus:
        for folder in root.glob(f"cpu{cpu}/cache/index*"):
            with contextlib.suppress(OSError):
                names = ("level", "type", "size", "shared_cpu_list")
                level, kind, size, sharing = ((folder / name).read_text("utf-8").strip() for name in names)
                if kind != "Instruction":
                    caches[int(level), sharing] = int(size.removesuffix("K")) << 10
    last_level = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last_level)
