"""Which NVIDIA GPUs and slices a process is shown, by made-up tools of the driver."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.gpus import nvidia
from kernels.gpus.nvidia import Gpu, shown
from tests.support.fake_nvml import FakeNvml, Handle

MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
SMI = """9.0, GPU-aaaa, 143771, Enabled, NVIDIA H200
9.0, GPU-bbbb, 143771, Disabled, NVIDIA H200
10.0, GPU-bcde, [N/A], [N/A], NVIDIA B200, a made-up one
"""
WHOLE = SMI.replace("Enabled", "Disabled")


@pytest.fixture
def no_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def smi(monkeypatch, tmp_path, no_nvml):
    """An nvidia-smi that runs a line of shell."""

    def is_here(script: str, folder: Path = tmp_path) -> None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(nvidia, "SMI_FOLDERS", ())
    return is_here


@pytest.fixture
def nvml(monkeypatch):
    made = FakeNvml(("GPU-aaaa", "GPU-bbbb"))
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def divide(handle: Handle) -> None:
    """Into 3g.40gb, whose compute is divided again, one that this container was not given, and 1g.10gb."""
    name = handle.name
    handle.slices = [
        Handle("MIG-1111", f"{name}", 40448),
        None,
        Handle("MIG-2222", f"{name} MIG 1g.10gb", 9984),
    ]
    handle.slices[0].place, handle.slices[2].place = (2, 0), (9, 0)


def test_what_a_command_says_and_why_that_is_not_all():
    assert nvidia.answer("printf", "\\377") == ("\ufffd", "")
    assert nvidia.answer("sh", "-c", "echo on; echo 2; echo off >&2; exit 3") == ("on\n2", "on")


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb", "GPU-bcde"]), ("2,0", ["GPU-bcde", "GPU-aaaa"]),
        ("GPU-bc", ["GPU-bcde"]), ("GPU-b", []), ("1,7,0", ["GPU-bbbb"]), ("0,1,0", []),
        ("GPU-aa,GPU-aaaa", []), ("", []),
    ],
)  # fmt: skip
def test_gpus_are_numbered_as_torch_sees_them(smi, setting, wanted):
    smi(f"cat <<END\n{WHOLE}END")
    known, wrong = nvidia.gpus()
    assert wrong == ""
    found = shown(known, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
    assert [gpu.uuid for gpu in found] == wanted
    assert shown(known[:1], {"CUDA_VISIBLE_DEVICES": ""}) == []
    assert known[2] == Gpu("sm_100", "NVIDIA B200, a made-up one", 0, "GPU-bcde", divided=False)


def test_free_memory_is_nvmls_or_else_nvidia_smis(smi, monkeypatch):
    assert nvidia.free_bytes("GPU-aaaa") is None
    smi("echo 70000")
    assert nvidia.free_bytes("GPU-aaaa") == 70000 << 20
    made = FakeNvml(("GPU-aaaa",))
    monkeypatch.setitem(sys.modules, "pynvml", made)
    assert nvidia.free_bytes("GPU-aaaa") == (made.handles[0].mebibytes - 1000) << 20


@pytest.mark.parametrize(("script", "said"), [
    (f"echo '{MISMATCH}'; echo NVML library version: 550; exit 18", MISMATCH),
    ("echo 'no permission' >&2; exit 4", "no permission"),
    ("echo 'no permission' >&2", "no permission"),
    ("echo 'No devices were found'", "No devices were found"),
    ("exit 9", "exit code 9"),
    ("true", "it shows no GPU"),
])  # fmt: skip
def test_what_nvidia_smi_fails_with_is_quoted(smi, script, said):
    smi(script)
    assert nvidia.gpus() == ([], f"nvidia-smi: {said}")


def test_a_gpu_that_fell_off_the_bus_takes_no_other_with_it(smi):
    handle = "Unable to determine the device handle for GPU"
    smi(f"echo '{WHOLE}{handle}3: Unknown Error\n{handle}4: Lost'; exit 15")
    known, wrong = nvidia.gpus()
    assert [gpu.uuid for gpu in known] == ["GPU-aaaa", "GPU-bbbb", "GPU-bcde"]
    assert wrong == "nvidia-smi: Unable to determine the device handle for GPU3: Unknown Error"


def test_nvidia_smi_is_found_where_containers_have_it(smi, tmp_path, monkeypatch):
    assert nvidia.gpus() == ([], "")
    (tmp_path / "nvidia/bin").mkdir(parents=True)
    monkeypatch.setattr(nvidia, "SMI_FOLDERS", (str(tmp_path / "nvidia/bin"),))
    smi("echo '9.0, GPU-aaaa, 81559, Disabled, NVIDIA H100'", tmp_path / "nvidia/bin")
    assert nvidia.gpus() == ([Gpu("sm_90", "NVIDIA H100", 81559 << 20, "GPU-aaaa", divided=False)], "")


LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
  MIG 1g.18gb     Device  0: (UUID: MIG-1111)
  MIG 1c.3g.71gb  Device  1: (UUID: MIG-GPU-aaaa/2/0)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
"""


@pytest.mark.parametrize(
    ("setting", "name", "gigabytes"),
    [
        (None, "NVIDIA H200 MIG 1g.18gb", 18), ("0", "NVIDIA H200 MIG 1g.18gb", 18),
        ("1,0", "NVIDIA H200 MIG 1g.18gb", 18), ("MIG-11,MIG-GPU-aaaa/2/0", "NVIDIA H200 MIG 1g.18gb", 18),
        ("MIG-GPU-aaaa/2/0", "NVIDIA H200 MIG 1c.3g.71gb", 71),
        ("MIG-GPU-aaaa/7/0", "NVIDIA H200 MIG-GPU-aaaa/7/0", 0), ("MIG-3333", "", 0),
        ("MIG-GPU-zzzz/1/0", "", 0),
    ],
)  # fmt: skip
def test_of_slices_one_is_shown_as_nvidia_smi_lists_it(smi, setting, name, gigabytes):
    smi(f"if [ $1 = -L ]; then cat <<END\n{LISTED}END\nelse cat <<END\n{SMI}END\nfi")
    known, wrong = nvidia.gpus()
    found = shown(known, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
    assert wrong == "" and [(gpu.name, gpu.memory) for gpu in found] == (
        [(name, gigabytes * 10**9)] if name else []
    )
    assert [gpu.uuid for gpu in shown(known, {"CUDA_VISIBLE_DEVICES": "1,2"})] == ["GPU-bbbb", "GPU-bcde"]


def test_a_slice_that_no_tool_lists_is_one_device_of_unknown_memory():
    gpus = [Gpu("sm_90", "NVIDIA H100", 80 << 30, f"GPU-{digit}0") for digit in range(4)] + [nvidia.LOST]
    for entry in ("MIG-77", "MIG-GPU-20/1/0"):
        setting = {"CUDA_VISIBLE_DEVICES": f"{entry},MIG-78"}
        assert shown(gpus, setting) == [Gpu("sm_90", f"NVIDIA H100 {entry}", 0, entry)]
        assert shown([replace(gpu, divided=False) for gpu in gpus], setting) == []


def test_nvml_says_it_first(nvml, smi_must_not_run):
    nvml.handles[1].mebibytes = 0  # the CPU's memory, as of GB10
    assert nvidia.gpus() == (
        [
            Gpu("sm_90", "NVIDIA H100 80GB HBM3", 81559 << 20, "GPU-aaaa", divided=False),
            Gpu("sm_90", "NVIDIA H100 80GB HBM3", 0, "GPU-bbbb", divided=False),
        ],
        "",
    )


@pytest.fixture
def smi_must_not_run(monkeypatch):
    monkeypatch.setattr(nvidia, "smi_program", lambda: pytest.fail("NVML had said it"))


@pytest.mark.parametrize(("setting", "uuid", "name"), [
    (None, "MIG-1111", "MIG 1c.3g.40gb"),
    ("MIG-2222", "MIG-2222", "MIG 1g.10gb"),
    ("MIG-GPU-aaaa/9/0", "MIG-2222", "MIG 1g.10gb"),
    ("MIG-2,MIG-1", "MIG-2222", "MIG 1g.10gb"),
])  # fmt: skip
def test_nvml_tells_slices_with_their_own_memory(nvml, smi_must_not_run, setting, uuid, name):
    divide(nvml.handles[0])
    known, _ = nvidia.gpus()
    (found,) = shown(known, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
    assert (found.uuid, found.name) == (uuid, f"NVIDIA H100 80GB HBM3 {name}")
    assert found.memory == {"MIG-1111": 40448, "MIG-2222": 9984}[uuid] << 20


@pytest.mark.parametrize(
    ("total", "slices", "size", "name"),
    [
        (81559, 1, 9984, "1g.10gb"),
        (81559, 3, 40448, "3g.40gb"),
        (143771, 3, 71168, "3g.71gb"),
        (40960, 1, 4864, "1g.5gb"),
        (0, 1, 9984, "1g.10gb"),
    ],
    ids=["H100", "H100", "H200", "A100 40GB", "unknown"],
)
def test_a_slice_is_called_as_nvidia_does(total, slices, size, name):
    """total, size: MiB of the GPU and of the slice"""
    attributes = SimpleNamespace(
        computeInstanceSliceCount=slices, gpuInstanceSliceCount=slices, memorySizeMB=size
    )
    assert nvidia._profile(attributes, total << 20) == name


def test_a_gpu_that_cannot_be_used_keeps_its_number(nvml, smi_must_not_run):
    """One of another job, which NVML may not show us, has none."""
    nvml.handles += [Handle("GPU-cccc"), Handle("GPU-dddd")]
    nvml.handles[0].refusal, nvml.handles[2].refusal = 15, 4
    nvml.handles[1].slices = [None]
    known, wrong = nvidia.gpus()
    assert wrong == (
        "NVML: GPU 0: GPU is lost; NVML: GPU 2: Insufficient Permissions; "
        "GPU 1 is in MIG mode and has no slice for this process"
    )
    for setting, wanted in ((None, ["GPU-dddd"]), ("2", ["GPU-dddd"]), ("0", []), ("1", [])):
        found = shown(known, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
        assert [gpu.uuid for gpu in found] == wanted


def test_a_gpu_without_slices_is_told_by_either_tool(smi, monkeypatch):
    wrong = "GPU 0 is in MIG mode and has no slice for this process"
    smi(f"if [ $1 = -L ]; then echo 'GPU 0: NVIDIA H200 (UUID: GPU-aaaa)'; else cat <<END\n{SMI}END\nfi")
    known, said = nvidia.gpus()
    assert ([gpu.uuid for gpu in shown(known, {})], said) == (["GPU-bbbb", "GPU-bcde"], wrong)
    made = FakeNvml(("GPU-aaaa",))
    made.handles[0].slices = [None]
    monkeypatch.setitem(sys.modules, "pynvml", made)
    known, said = nvidia.gpus()
    assert (shown(known, {}), said) == ([], wrong)


@pytest.mark.parametrize("asked", ["nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetAttributes"])
@pytest.mark.parametrize("old", ["pynvml", "driver"])
def test_nvidia_smi_is_asked_where_nvml_is_too_old(nvml, monkeypatch, old, asked):
    divide(nvml.handles[0])
    if old == "pynvml":
        nvml.absent = (asked,)
    else:
        nvml.refused[asked] = 13
    gpu = Gpu("sm_90", "NVIDIA H200", 0, "GPU-aaaa")
    monkeypatch.setattr(nvidia, "_by_smi", lambda: ([gpu], ""))
    assert nvidia.gpus() == ([gpu], "")


def test_where_nvml_fails_nvidia_smi_is_asked_and_both_are_quoted(nvml, monkeypatch):
    nvml.refused["nvmlInit"] = 9
    monkeypatch.setattr(nvidia, "smi_program", lambda: None)
    assert nvidia.gpus() == ([], "NVML: Driver Not Loaded")
    monkeypatch.setattr(nvidia, "_by_smi", lambda: ([], "nvidia-smi: No devices were found"))
    assert nvidia.gpus() == ([], "NVML: Driver Not Loaded; nvidia-smi: No devices were found")
    nvml.refused["nvmlInit"] = 12  # no driver at all: the library alone is no hint
    assert nvidia.gpus() == ([], "nvidia-smi: No devices were found")


def test_a_driver_leaves_traces(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: name)
    assert nvidia.driver_trace(tmp_path) == "libcuda.so.1"
    for place in ("proc/driver/nvidia", "dev/dxg", "dev/nvidiactl", "dev/nvidia3"):
        (tmp_path / place).mkdir(parents=True)
        assert nvidia.driver_trace(tmp_path) == str(tmp_path / place)


def test_an_nvidia_smi_from_before_mig_is_asked_without_it(smi):
    smi(
        "case $1 in *mig*) echo 'mig.mode.current is not a valid field to query.'; exit 2;; esac\n"
        "echo '7.0, GPU-aaaa, 16160, Tesla V100-SXM2-16GB, a made-up one'"
    )
    name = "Tesla V100-SXM2-16GB, a made-up one"
    assert nvidia.gpus() == ([Gpu("sm_70", name, 16160 << 20, "GPU-aaaa")], "")
