"""What machine this is, read from made-up systems."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import NothingRan
from harness.run.device import device_type, machine_name
from harness.run.device_lock import device_lock
from kernels import platform
from kernels.platform import Platform, _amd, _cpu_facts, available_memory, free_memory, run

MI300X = "simd_count 1216\ngfx_target_version 90402\n"


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
    node(tmp_path, 2, MI300X)
    (refused / "properties").unlink()
    (refused / "properties").mkdir()
    (found,) = _amd(tmp_path)
    assert (found.device, found.arch, found.memory) == ("cuda:0", "gfx942", 206141652992)


SMI = """9.0, GPU-aaaa, 143771, NVIDIA H200
9.0, GPU-bbbb, 143771, NVIDIA H200
10.0, GPU-bcde, [N/A], NVIDIA B200, a made-up one
"""


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb", "GPU-bcde"]),
        ("2,0", ["GPU-bcde", "GPU-aaaa"]),
        ("GPU-bc", ["GPU-bcde"]),
        ("GPU-b", []),
        ("1,7,0", ["GPU-bbbb"]),
        ("", []),
        ("MIG-1234", ["GPU-aaaa", "GPU-bbbb", "GPU-bcde"]),
    ],
)
def test_gpus_are_numbered_as_torch_sees_them(monkeypatch, setting, wanted):
    monkeypatch.setattr(platform, "run", lambda *command: SMI)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    found = platform._nvidia()
    assert [gpu.uuid for gpu in found] == wanted
    assert [gpu.device for gpu in found] == [f"cuda:{i}" for i in range(len(wanted))]
    by_uuid = {gpu.uuid: gpu for gpu in found}
    if "GPU-bcde" in by_uuid:
        last = by_uuid["GPU-bcde"]
        assert (last.arch, last.name, last.memory) == ("sm_100", "NVIDIA B200, a made-up one", 0)


def test_amds_are_chosen_by_the_name_that_rocm_gives_them(tmp_path, monkeypatch):
    node(tmp_path, 1, MI300X + "unique_id 255\n")
    node(tmp_path, 2, MI300X + "unique_id 4096\n")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-0000000000001000,0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    (found,) = _amd(tmp_path)
    assert (found.device, found.uuid) == ("cuda:0", "GPU-00000000000000ff")


def test_an_amd_is_called_by_its_product_and_told_from_others_by_its_place(tmp_path):
    """A virtual function has no unique id."""
    (node(tmp_path, 1, MI300X + "device_id 29857\nlocation_id 3072\ndomain 1\n") / "name").write_text(
        "ip discovery"
    )
    node(tmp_path, 2, MI300X + "device_id 1\nlocation_id 3328\ndomain 1\n")
    first, second = _amd(tmp_path)
    assert (first.name, second.name) == ("AMD Instinct MI300X", "")
    assert (first.uuid, second.uuid) == ("pci-0001:0c00", "pci-0001:0d00")
    assert (device_type(first), machine_name(first)) == ("MI300X", "mi300x")


def test_a_device_is_locked_by_whatever_number_it_has():
    one = Platform("cuda", "sm_90", "cuda:0", uuid="GPU-aaaa")
    same, other = replace(one, device="cuda:3"), replace(one, uuid="GPU-bbbb")
    with device_lock(one):
        with device_lock(other):
            pass
        with pytest.raises(NothingRan, match="cuda:3 is being measured by process"), device_lock(same):
            pass


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


@pytest.mark.parametrize(
    ("files", "mebibytes"),
    [
        ({}, 4096),
        ({"memory.max": "max", "memory.current": "7"}, 4096),
        ({"memory.max": str(1024 << 20), "memory.current": str(256 << 20)}, 768),
        (
            {
                "memory/memory.limit_in_bytes": str(1024 << 20),
                "memory/memory.usage_in_bytes": str(512 << 20),
            },
            512,
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "7"}, 4096),
    ],
    ids=["no group", "2, no limit", "2", "1", "1, no limit"],
)
def test_memory_is_what_the_control_group_leaves(tmp_path, files, mebibytes):
    of_root = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    for name, content in (of_root | {"proc/meminfo": "MemAvailable: 4194304 kB"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert available_memory(tmp_path) == mebibytes << 20


def test_a_command_that_is_missing_fails_or_hangs_says_nothing(monkeypatch):
    assert run("echo", "it works") == "it works"
    assert run("no-such-command") == run("false") == ""

    def hang(*command, **how):
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(subprocess, "run", hang)
    assert run("nvidia-smi") == ""


@pytest.mark.parametrize(
    ("module", "wheel"),
    [
        ("flash_mla", "sgl-flash-mla"),
        ("flash_mla", "flash-mla"),
        ("sgl_kernel", "sglang-kernel"),
        ("sgl_kernel", "sgl-kernel"),
        ("tokenspeed_mla", "tokenspeed-mla"),
        ("tilelang", "tilelang"),
        ("flash_attn.cute", "flash-attn-4"),
        ("deep_gemm", "sgl-deep-gemm"),
        ("flashinfer", "flashinfer-python"),
    ],
)
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
    assert platform.version.__wrapped__("around.gone") is None


def test_free_memory_of_a_gpu_is_what_its_driver_says(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(platform, "run", lambda *command: asked.append(command) or "70000")
    gpu = Platform("cuda", "sm_90", "cuda:0", memory=80 << 30, uuid="GPU-1")
    assert free_memory(gpu) == 70000 << 20
    assert asked[0][:3] == ("nvidia-smi", "-i", "GPU-1")
    monkeypatch.setattr(platform, "run", lambda *command: "[N/A]")
    assert free_memory(gpu) == gpu.memory

    gpu = Platform("rocm", "gfx942", "cuda:0", memory=192 << 30, uuid="GPU-00ab")
    assert free_memory(gpu, tmp_path) == gpu.memory
    for card, unique, used in (("card0", "00cd", 100), ("card1", "00ab", 2)):
        folder = tmp_path / "sys/class/drm" / card / "device"
        folder.mkdir(parents=True)
        (folder / "unique_id").write_text(unique + "\n")
        (folder / "mem_info_vram_used").write_text(f"{used << 30}\n")
    assert free_memory(gpu, tmp_path) == 190 << 30
