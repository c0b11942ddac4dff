"""What machine this is, read from made-up systems."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import kernels
from harness.catalogue.devices import part_of
from harness.run.device import device_type, machine_name
from kernels import platform
from kernels.gpus import Gpu
from kernels.platform import Platform, _amd, _cpu_facts, _kfd, available_memory, free_memory, run
from kernels.triton_runtime import target_of
from kernels.tuning import Target

MI300X = "simd_count 1216\ngfx_target_version 90402\n"


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    for variable in platform.VISIBLE:
        monkeypatch.delenv(variable, raising=False)


def node(root: Path, number: int, properties: str) -> Path:
    folder = root / str(number)
    (folder / "mem_banks/0").mkdir(parents=True)
    (folder / "mem_banks/0/properties").write_text("heap_type 1\nsize_in_bytes 206141652992\n")
    (folder / "properties").write_text(properties)
    return folder


def test_gpus_that_a_container_was_not_given_are_no_devices(tmp_path):
    """The kernel driver shows their nodes and refuses to let them be read (kfd_topology.c: EPERM); a folder
    cannot be read either, by root too."""
    node(tmp_path, 0, "cpu_cores_count 96\ngfx_target_version 0\n")
    refused = node(tmp_path, 1, MI300X)
    cache = node(tmp_path, 2, MI300X) / "caches/0"
    cache.mkdir(parents=True)
    (cache / "properties").write_text("level 3\nsize 262144\n")
    (refused / "properties").unlink()
    (refused / "properties").mkdir()
    (found,) = _amd(tmp_path)
    assert (found.device, found.arch, found.memory) == ("cuda:0", "gfx942", 206141652992)
    assert found.last_level == 256 << 20


def test_the_last_level_caches_of_all_dies_count(tmp_path):
    names = ("shared_cpu_list", "level", "type", "size")
    for cpu, die in enumerate(("0-1", "0-1", "2")):
        caches = ((die, "3", "Unified", "32K"), (die, "2", "Unified", "64K"), (die, "4", "Instruction", "1K"))
        for index, facts in enumerate(caches):
            for name, fact in zip(names, facts, strict=True):
                (folder := tmp_path / f"cpu{cpu}/cache/index{index}").mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(fact)
    found = [platform._cpu_last_level(cpus, tmp_path) for cpus in ((0, 1), (0, 1, 2), ())]
    assert found == [32 << 10, 64 << 10, 0]


H100 = Gpu("sm_90", "NVIDIA H100 80GB HBM3", 81559 << 20, "GPU-aaaa")
MISMATCH = "NVML: Driver/library version mismatch"


class Machine:
    """What a machine's tools say: nvidia-smi, a trace of a driver, the build of torch, and torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus: list[Gpu] = []
        self.amds: list[Platform] = []
        self.wrong = self.trace = self.build = ""
        self.torch: tuple[str, str] | None = None
        monkeypatch.setattr(platform.gpus, "nvidia_gpus", lambda: (self.gpus, self.wrong))
        monkeypatch.setattr(platform.gpus, "driver_trace", lambda: self.trace)
        monkeypatch.setattr(platform, "_kfd", lambda *_: self.amds)
        monkeypatch.setattr(platform, "torch_build", lambda: self.build)
        monkeypatch.setattr(platform, "version", lambda module: "2.11.0")
        monkeypatch.setattr(platform, "answer", self.ask)

    def ask(self, *command: str, timeout_s: float) -> tuple[str, str]:
        assert self.torch is not None, "torch was imported without a reason"
        return self.torch

    def found(self) -> tuple[list[Platform], str]:
        return platform._gpus.__wrapped__()


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_gpus_are_called_as_torch_does(machine):
    machine.gpus = [H100, replace(H100, uuid="GPU-bbbb")]
    found, wrong = machine.found()
    assert [(p.kind, p.device, p.uuid) for p in found] == [
        ("cuda", "cuda:0", "GPU-aaaa"),
        ("cuda", "cuda:1", "GPU-bbbb"),
    ]
    assert (found[0].name, found[0].memory, wrong) == (H100.name, H100.memory, "")


WHOLE, DIVIDED = replace(H100, divided=False), replace(H100, divided=True)
NOT_SHOWN = "/dev/nvidia0 is here, but no GPU is shown"


@pytest.mark.parametrize(("given", "visible", "said"), [
    ({}, None, ""),
    ({"build": "cpu"}, None, ""),
    ({"build": "cuda"}, None, "torch 2.11.0 is built for CUDA, but no driver for that is here"),
    ({"build": "cpu", "trace": "/dev/nvidia0"}, None, f"{NOT_SHOWN}; torch 2.11.0 is built for CPUs"),
    ({"trace": "/dev/nvidia0"}, None, f"{NOT_SHOWN}; torch is not installed"),
    # The user hides all of them.
    *(({"build": "cuda", "wrong": MISMATCH}, hidden, "") for hidden in ("", "-1", "NoDevFiles")),
    *(
        ({"gpus": [WHOLE]}, none, f"CUDA_VISIBLE_DEVICES={none} selects none of the GPUs here (1)")
        for none in ("7", "MIG-1234")
    ),
    (
        {"amds": [Platform("rocm", "a")] * 2},
        "7",
        "CUDA_VISIBLE_DEVICES=7 selects none of the GPUs here (2)",
    ),
    ({"gpus": [DIVIDED], "wrong": "no slice"}, None, "no slice"),
    (
        {"gpus": [DIVIDED], "wrong": "no slice"},
        "0",
        "CUDA_VISIBLE_DEVICES=0 selects none of the GPUs here (1); no slice",
    ),
])  # fmt: skip
def test_why_no_gpu_is_found(machine, monkeypatch, given, visible, said):
    vars(machine).update(given)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.found() == ([], said)


def test_torch_tells_what_the_driver_s_tools_do_not(machine, monkeypatch):
    machine.build, machine.wrong = "cuda", MISMATCH
    machine.torch = '[["sm_90", "NVIDIA H100", 85000000000, "GPU-aa"]]', ""
    wanted = Platform("cuda", "sm_90", "cuda:0", "NVIDIA H100", memory=85000000000, uuid="GPU-aa")
    assert machine.found() == ([wanted], "")
    machine.torch = "", "No CUDA GPUs are available"
    assert machine.found() == ([], f"{MISMATCH}; torch: No CUDA GPUs are available")

    # A slice that nvidia-smi does not list.
    machine.gpus, machine.wrong = [H100], ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    (found,), wrong = machine.found()
    assert (found.name, found.memory, found.uuid) == ("NVIDIA H100 80GB HBM3 MIG-1234", 0, "MIG-1234")
    assert wrong.startswith("MIG-1234 has unknown memory, as nvidia-smi does not list it; torch: ")
    machine.torch = 'a warning\n[["sm_90", "NVIDIA H100 MIG 1g.10gb", 10200547328, "MIG-1234"]]', ""
    (found,), wrong = machine.found()
    assert (found.name, found.memory, wrong) == ("NVIDIA H100 MIG 1g.10gb", 10200547328, "")
    machine.build = "cpu"  # it is a device still, and the build is what is told
    (found,), wrong = machine.found()
    assert (found.uuid, wrong.partition("; ")[2]) == ("MIG-1234", "torch 2.11.0 is built for CPUs")


def test_torch_is_asked_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Of torch 2.11's properties, and of older ones that have no uuid."""
    text = (
        "import os\nfrom types import SimpleNamespace as S\n"
        "assert os.environ['CUDA_DEVICE_ORDER'] == 'PCI_BUS_ID'\n"
        "h100 = S(major=9, minor=0, name='NVIDIA H100', total_memory=85, uuid='11223344-5566')\n"
        "part = S(major=9, minor=0, name='NVIDIA H100 MIG 1g.10gb', total_memory=10)\n"
        "gpus = [h100, part]\n"
        "version = S(hip=None, cuda='13.0')\n"
        "cuda = S(init=lambda: None, device_count=lambda: 2, get_device_properties=gpus.__getitem__)\n"
    )
    (tmp_path / "torch.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(platform, "torch_build", lambda: "cuda")
    found, wrong = platform._by_torch([], MISMATCH)
    assert [(p.device, p.name, p.memory, p.uuid) for p in found] == [
        ("cuda:0", "NVIDIA H100", 85, "GPU-11223344-5566"),
        ("cuda:1", "NVIDIA H100 MIG 1g.10gb", 10, ""),
    ]
    assert wrong == ""
    text = text.replace("major=9, minor=0", "gcnArchName='gfx942:xnack-'")
    (tmp_path / "torch.py").write_text(text.replace("hip=None, cuda='13.0'", "hip='7.1', cuda=None"))
    found, wrong = platform._by_torch([], MISMATCH)
    assert ([(p.arch, p.uuid) for p in found], wrong) == ([("gfx942", "")] * 2, "")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    assert platform._by_torch([], MISMATCH) == (
        [],
        f"{MISMATCH}; torch: libcudart.so.13: cannot open shared object file",
    )


@pytest.mark.parametrize(("hip", "kind", "arch"), [(None, "cuda", "sm_90"), ("7.1", "rocm", "gfx942")])
def test_a_tensor_s_device_is_what_torch_says_of_it(monkeypatch, hip, kind, arch):
    import torch

    facts = {"major": 9, "minor": 0, "gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 132}
    gpu = SimpleNamespace(**facts, name="a GPU", total_memory=85)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    for device, name in (("cuda", "cuda:0"), ("cuda:1", "cuda:1")):
        assert platform.of(torch.device(device)) == Platform(kind, arch, name, "a GPU", memory=85)
        assert target_of(torch.device(device)) == Target(kind, arch, 132, "a GPU")


@pytest.mark.parametrize(("text", "kind"), [
    ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda"),
    ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n", "rocm"),
    ("cuda = None\nhip = None\n", "cpu"),
    ('cuda = "12.8"\n', "cuda"),
])  # fmt: skip
def test_the_build_of_torch_is_read_and_not_imported(tmp_path, monkeypatch, text, kind):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.11.0'\n{text}")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert platform.torch_build.__wrapped__() == kind
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: None)
    assert platform.torch_build.__wrapped__() == ""


def test_no_row_runs_on_a_gpu_that_torch_is_not_built_for(monkeypatch):
    here = Platform("rocm", "gfx942", "cuda:0", "AMD Instinct MI300X")
    rows = [row for op in kernels.OPS for row in kernels.implementations(op)]
    monkeypatch.setattr(platform, "torch_build", lambda: "cpu")
    assert not [row.name for row in rows if row.available(here).ok]
    monkeypatch.setattr(platform, "torch_build", lambda: "rocm")
    assert [row.name for row in rows if row.available(here).ok]
    assert Platform("rocm", "gfx942", "cuda:0", here=False).library("torch").ok
    assert Platform("cpu", "x86").library("torch").ok, "any build computes on a CPU"


def test_amds_are_chosen_by_the_name_that_rocm_gives_them(tmp_path, monkeypatch):
    node(tmp_path, 1, MI300X + "unique_id 255\n")
    node(tmp_path, 2, MI300X + "unique_id 4096\n")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-0000000000001000,0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # HIP's own goes before
    (found,) = _amd(tmp_path)
    assert (found.device, found.uuid) == ("cuda:0", "GPU-00000000000000ff")


def test_a_part_of_an_amd_is_chosen_by_a_name_of_its_own(tmp_path, monkeypatch):
    """Newer drivers give each part one; a name that several have chooses none, as in ROCr."""
    text = f"{MI300X}device_id {0x74A1}\nnum_xcc 1\nlocation_id 3072\nunique_id "
    for number, unique in enumerate((16, 17, 99, 99), 1):
        node(tmp_path, number, f"{text}{unique}\n")
    for setting, wanted in (
        ("GPU-0000000000000011", ["GPU-0000000000000011"]),
        ("GPU-0000000000000063", []),
        ("1,3,1,0", ["GPU-0000000000000011", "pci-0000:0c00-4"]),
    ):
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", setting)
        assert [gpu.uuid for gpu in _amd(tmp_path)] == wanted
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,3,1,0")
    assert _amd(tmp_path) == []


def test_an_amd_is_called_by_its_product_and_told_from_others_by_its_place(tmp_path):
    """A virtual function has no unique id."""
    (node(tmp_path, 1, MI300X + "device_id 29877\nlocation_id 3072\ndomain 1\n") / "name").write_text(
        "ip discovery"
    )
    node(tmp_path, 2, MI300X + "device_id 1\nlocation_id 3328\ndomain 1\n")
    first, second = _kfd(tmp_path)
    assert (first.name, second.name) == ("AMD Instinct MI300X VF", "")
    assert (first.uuid, second.uuid) == ("pci-0001:0c00", "pci-0001:0d00")
    assert (device_type(first), machine_name(first)) == ("MI300X", "mi300x")


@pytest.mark.parametrize(("device", "dies", "told", "name"), [
    (0x74A1, 1, {}, "AMD Instinct MI300X CPX"),
    (0x74B5, 2, {}, "AMD Instinct MI300X VF QPX"),
    (0x74A0, 2, {}, "AMD Instinct MI300A TPX"),
    (0x75A3, 4, {}, "AMD Instinct MI355X DPX"),
    (0x74A2, 4, {}, "AMD Instinct MI308X"),
    (0x74A1, 1, {"compute": "CPX", "memory": "NPS4"}, "AMD Instinct MI300X CPX/NPS4"),
    (0x74A1, 8, {"compute": "SPX", "memory": "NPS1"}, "AMD Instinct MI300X"),
    (0x74A1, 8, {"compute": "UNKNOWN"}, "AMD Instinct MI300X"),
    (0x74A1, 0, {}, "AMD Instinct MI300X"),
])  # fmt: skip
def test_a_part_of_an_amd_has_a_name_and_a_lock_of_its_own(tmp_path, device, dies, told, name):
    """Parts share the unique id; of the place the highest bits may be a part's number."""
    text = f"{MI300X}device_id {device}\nunique_id 255\nnum_xcc {dies}\n"
    for number in (1, 2):
        node(tmp_path / "nodes", number, f"{text}location_id {(number << 28) + 0x0C00}\n")
    for kind, value in told.items():
        file = tmp_path / "pci/0000:0c:00.0" / f"current_{kind}_partition"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    first, second = _kfd(tmp_path / "nodes", tmp_path / "pci")
    assert first.name == second.name == name
    assert (first.uuid != second.uuid) == (part_of(name) != "")


GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd aes sve bf16 i8mm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1

processor\t: 1
Features\t: fp asimd
"""
EPYC = "processor\t: 0\nmodel name\t: AMD EPYC: 7763\nflags\t\t: fpu avx avx2\n"


@pytest.mark.parametrize(
    ("info", "machine", "arch", "name", "features"),
    [
        (GRAVITON, "aarch64", "aarch64", "aarch64 0x41 0xd40", {"fp", "asimd", "aes", "sve", "bf16", "i8mm"}),
        (EPYC, "x86_64", "x86-avx2", "AMD EPYC: 7763", {"fpu", "avx", "avx2"}),
        ("flags\t: avx2 avx512f\n", "x86_64", "x86-avx512", None, {"avx2", "avx512f"}),
        ("flags\t: avx2 avx512f amx_bf16\n", "x86_64", "x86-amx", None, {"avx2", "avx512f", "amx_bf16"}),
        ("", "x86_64", "x86", None, set()),
        ("", "arm64", "arm64", None, set()),
    ],
    ids=["arm64", "x86 with AVX2", "AVX-512", "AMX", "no cpuinfo", "no cpuinfo on arm64"],
)
def test_a_cpu_is_what_cpuinfo_and_the_system_say(info, machine, arch, name, features):
    found = _cpu_facts(info, machine)
    assert (found[0], found[2]) == (arch, features)
    assert found[1] == name if name else found[1], "a name there is always"


def v1(limit: int, used: int, group: str = "memory") -> dict[str, object]:
    return {f"{group}/memory.limit_in_bytes": limit, f"{group}/memory.usage_in_bytes": used}


def v2(limit: object, used: int, group: str = ".") -> dict[str, object]:
    return {f"{group}/memory.max": limit, f"{group}/memory.current": used}


@pytest.mark.parametrize(("files", "mebibytes"), [
    ({}, 4096),
    (v2("max", 7), 4096),
    (v2(1024, 256), 768),
    (v1(1024, 512), 512),
    (v1(1024, 256, "cpu,memory/none"), 768),
    (v1((1 << 43) - 1, 7), 4096),  # what stands there for no limit
    (v2(1024, 900) | {"memory.stat": f"anon 9\ninactive_file {600 << 20}\nactive_file {200 << 20}"}, 924),
    (
        v1(1024, 900, "memory/job")
        | {"memory/job/memory.stat": f"total_active_file {500 << 20}\ntotal_inactive_file {300 << 20}"},
        924,
    ),
    (v2("max", 0, "job/step") | v2(1024, 24, "job") | v2(2048, 1536), 512),  # the least of all
    (v2(8, 9, "job"), 0),
    ({"memory.max": 1024, "memory.current": f"{(256 << 20) + 5000}"}, 768),  # a MiB's part is none
])  # fmt: skip
def test_memory_is_what_the_control_group_leaves(tmp_path, files, mebibytes):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,memory:/none\n4:memory:/job\n0::/job/step\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 4194304 kB\n")
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content << 20 if isinstance(content, int) else content}\n")
    assert available_memory(tmp_path) == mebibytes << 20
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory(tmp_path / "without proc") == everything


@pytest.mark.parametrize(("here", "ok"), [("g++", True), ("clang++", True), ("cc", False)])
def test_torch_compiles_for_a_cpu_with_either_of_two(monkeypatch, here, ok):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(platform.shutil, "which", {here: here}.get)
    assert Platform("cpu", "x86").compiler().ok == ok


def test_a_command_that_is_missing_fails_or_hangs_says_nothing(monkeypatch):
    assert run("no-such-command") == run("false") == ""

    def hang(*command, **how):
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(subprocess, "run", hang)
    assert run("nvidia-smi") == ""
    assert platform.answer("nvidia-smi") == ("", "no answer within 30 s")


@pytest.mark.parametrize(
    ("module", "wheel"),
    [
        ("flash_mla", "sgl-flash-mla"), ("flash_mla", "flash-mla"), ("sgl_kernel", "sglang-kernel"),
        ("sgl_kernel", "sgl-kernel"), ("tokenspeed_mla", "tokenspeed-mla"), ("tilelang", "tilelang"),
        ("flash_attn.cute", "flash-attn-4"), ("deep_gemm", "sgl-deep-gemm"),
        ("flashinfer", "flashinfer-python"),
    ],
)  # fmt: skip
def test_a_module_has_the_version_of_the_wheel_that_brings_it(tmp_path, monkeypatch, module, wheel):
    """Named as in the METADATA of the wheels of 2026: sgl-flash-mla 1.0.0, sglang-kernel 0.4.10, sgl-kernel
    0.3.21, tokenspeed-mla 2.0.4, tilelang 0.1.15, flash-attn-4 4.0.0b36, flashinfer-python 0.7.2.post1."""
    folder = tmp_path / module.replace(".", "/")
    folder.mkdir(parents=True)
    (tmp_path / module.partition(".")[0] / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "flash_mla_interface.py").touch()
    (folder / "include/deep_gemm").mkdir(parents=True)
    about = tmp_path / f"{wheel.replace('-', '_')}-7.8.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 7.8.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module.partition(".")[0], raising=False)
    platform.version.cache_clear()
    try:
        assert platform.version(module) == "7.8.9"
    finally:
        platform.version.cache_clear()


def test_a_module_is_looked_for_without_importing_the_package_around_it(tmp_path, monkeypatch):
    """flash-attn-4 lies in the package of flash-attn 2, which loads its compiled part."""
    (tmp_path / "around" / "part").mkdir(parents=True)
    (tmp_path / "around" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "around" / "part" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert platform.version.__wrapped__("around.part") == "unknown"
    assert {platform.version.__wrapped__(f"around.{name}") for name in ("gone", "part.part")} == {None}


def test_free_memory_of_a_gpu_is_what_its_driver_says(monkeypatch, tmp_path):
    gpu = Platform("cuda", "sm_90", "cuda:0", memory=80 << 30, uuid="GPU-1")
    for said, free in (({"GPU-1": 70 << 30}, 70 << 30), ({"GPU-1": 0}, 0), ({}, gpu.memory)):
        monkeypatch.setattr(platform.gpus, "free_bytes", said.get)
        assert free_memory(gpu) == free
        assert free_memory(replace(gpu, here=False)) == gpu.memory
    assert free_memory(replace(gpu, memory=0)) is None

    gpu = Platform("rocm", "gfx942", "cuda:0", memory=192 << 30, uuid="GPU-00ab")
    assert free_memory(gpu, tmp_path) == gpu.memory
    for card, unique, used in (("card0", "00cd", 100), ("card1", "00ab", 2)):
        folder = tmp_path / "sys/class/drm" / card / "device"
        folder.mkdir(parents=True)
        (folder / "unique_id").write_text(unique + "\n")
        (folder / "mem_info_vram_used").write_text(f"{used << 30}\n")
    assert free_memory(gpu, tmp_path) == 190 << 30
