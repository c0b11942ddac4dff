"""Which NVIDIA GPUs and slices a process is shown, by made-up tools of the driver."""

from dataclasses import replace
from pathlib import Path

import pytest

from kernels import gpus
from kernels.gpus import Gpu, shown

MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
SMI = """9.0, GPU-aaaa, 143771, Enabled, NVIDIA H200
9.0, GPU-bbbb, 143771, Disabled, NVIDIA H200
10.0, GPU-bcde, [N/A], [N/A], NVIDIA B200, a made-up one
"""
WHOLE = SMI.replace("Enabled", "Disabled")


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """An nvidia-smi that runs a line of shell."""

    def is_here(script: str, folder: Path = tmp_path) -> None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpus, "SMI_FOLDERS", ())
    return is_here


def test_what_a_command_says_and_why_that_is_not_all():
    assert gpus.answer("printf", "\\377") == ("\ufffd", "")
    assert gpus.answer("sh", "-c", "echo on; echo 2; echo off >&2; exit 3") == ("on\n2", "on")


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
    known, wrong = gpus.nvidia_gpus()
    assert wrong == ""
    found = shown(known, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
    assert [gpu.uuid for gpu in found] == wanted
    assert shown(known[:1], {"CUDA_VISIBLE_DEVICES": ""}) == []
    assert known[2] == Gpu("sm_100", "NVIDIA B200, a made-up one", 0, "GPU-bcde", divided=False)


def test_free_memory_is_what_nvidia_smi_says(smi):
    assert gpus.free_bytes("GPU-aaaa") is None
    smi("echo 70000")
    assert gpus.free_bytes("GPU-aaaa") == 70000 << 20


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
    assert gpus.nvidia_gpus() == ([], f"nvidia-smi: {said}")


def test_a_gpu_that_fell_off_the_bus_takes_no_other_with_it(smi):
    handle = "Unable to determine the device handle for GPU"
    smi(f"echo '{WHOLE}{handle}3: Unknown Error\n{handle}4: Lost'; exit 15")
    known, wrong = gpus.nvidia_gpus()
    assert [gpu.uuid for gpu in known] == ["GPU-aaaa", "GPU-bbbb", "GPU-bcde"]
    assert wrong == "nvidia-smi: Unable to determine the device handle for GPU3: Unknown Error"


def test_nvidia_smi_is_found_where_containers_have_it(smi, tmp_path, monkeypatch):
    assert gpus.nvidia_gpus() == ([], "")
    (tmp_path / "nvidia/bin").mkdir(parents=True)
    monkeypatch.setattr(gpus, "SMI_FOLDERS", (str(tmp_path / "nvidia/bin"),))
    smi("echo '9.0, GPU-aaaa, 81559, Disabled, NVIDIA H100'", tmp_path / "nvidia/bin")
    assert gpus.nvidia_gpus() == ([Gpu("sm_90", "NVIDIA H100", 81559 << 20, "GPU-aaaa", divided=False)], "")


LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
  MIG 1g.18gb     Device  0: (UUID: MIG-1111)
  MIG 1c.3g.71gb  Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
"""


@pytest.mark.parametrize(
    ("setting", "name", "gigabytes"),
    [
        (None, "NVIDIA H200 MIG 1g.18gb", 18), ("0", "NVIDIA H200 MIG 1g.18gb", 18),
        ("1,0", "NVIDIA H200 MIG 1g.18gb", 18), ("MIG-11,MIG-2222", "NVIDIA H200 MIG 1g.18gb", 18),
        ("MIG-2222", "NVIDIA H200 MIG 1c.3g.71gb", 71), ("MIG-3333", "", 0), ("MIG-", "", 0),
    ],
)  # fmt: skip
def test_of_slices_one_is_shown_as_nvidia_smi_lists_it(smi, setting, name, gigabytes):
    smi(f"if [ $1 = -L ]; then cat <<END\n{LISTED}END\nelse cat <<END\n{SMI}END\nfi")
    known, wrong = gpus.nvidia_gpus()
    found = shown(known, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
    assert wrong == "" and [(gpu.name, gpu.memory) for gpu in found] == (
        [(name, gigabytes * 10**9)] if name else []
    )
    assert [gpu.uuid for gpu in shown(known, {"CUDA_VISIBLE_DEVICES": "1,2"})] == ["GPU-bbbb", "GPU-bcde"]


def test_a_slice_that_no_tool_lists_is_one_device_of_unknown_memory():
    known = [Gpu("sm_90", "NVIDIA H100", 80 << 30, f"GPU-{digit}0") for digit in range(4)]
    setting = {"CUDA_VISIBLE_DEVICES": "MIG-77,MIG-78"}
    assert shown(known, setting) == [Gpu("sm_90", "NVIDIA H100 MIG-77", 0, "MIG-77")]
    assert shown([replace(gpu, divided=False) for gpu in known], setting) == []
    assert shown([*known, replace(known[0], name="NVIDIA H200")], setting) == []


def test_a_driver_leaves_traces(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: name)
    assert gpus.driver_trace(tmp_path) == "libcuda.so.1"
    for place in ("proc/driver/nvidia", "dev/dxg", "dev/nvidiactl", "dev/nvidia3"):
        (tmp_path / place).mkdir(parents=True)
        assert gpus.driver_trace(tmp_path) == str(tmp_path / place)


def test_a_gpu_in_mig_mode_without_slices_cannot_be_used(smi):
    smi(f"if [ $1 = -L ]; then echo 'GPU 0: NVIDIA H200 (UUID: GPU-aaaa)'; else cat <<END\n{SMI}END\nfi")
    known, said = gpus.nvidia_gpus()
    assert [gpu.uuid for gpu in shown(known, {})] == ["GPU-bbbb", "GPU-bcde"]
    assert said == "GPU 0 is in MIG mode and has no slice for this process"


def test_an_nvidia_smi_without_mig(smi):
    smi("echo '9.0, GPU-aaaa, 81559, NVIDIA H100, a made-up one'")
    assert gpus.nvidia_gpus() == ([Gpu("sm_90", "NVIDIA H100, a made-up one", 81559 << 20, "GPU-aaaa")], "")
