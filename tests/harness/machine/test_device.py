"""The device that a command names is found, or one line says why not. ../cli/transcripts/ has all
commands."""

from dataclasses import replace

import pytest

from harness.cluster import ray_cluster
from harness.errors import NOTHING_RAN, UsageError
from harness.machine import device
from harness.machine.device import choose_device
from kernels import platform
from kernels.platform import Platform, detect, devices
from tests.support.command_line import error_line

OP = ("--op", "mla_decode", "--case", "batch=1 ctx=4 heads=4")


def test_the_first_device_is_chosen_where_none_is_named():
    assert choose_device() is next(iter(devices().values()))
    assert choose_device("cpu").kind == "cpu"


GPU = Platform("cuda", "sm_90", "cuda:0", memory=80 << 30)
MISMATCH, LOST = "nvidia-smi: Driver/library version mismatch", "NVML: GPU 3: GPU is lost"


@pytest.mark.parametrize(("gpus", "problem", "note"), [
    ([], MISMATCH, "the CPU is measured, as no GPU can be"),
    ([GPU], LOST, "some GPUs cannot be used"),
    ([replace(GPU, memory=0)], LOST, "not all of the GPU is known"),
])  # fmt: skip
def test_a_gpu_that_cannot_be_used_is_always_reported(monkeypatch, capsys, gpus, problem, note):
    monkeypatch.setattr(platform, "_gpus", lambda: (gpus, problem))
    platform.devices.cache_clear()
    try:
        assert choose_device() == (gpus[0] if gpus else choose_device("cpu"))
        with pytest.raises(UsageError, match=f"devices here: .*cpu; {problem}"):
            choose_device("cuda:7")
    finally:
        platform.devices.cache_clear()
    assert capsys.readouterr().err == f"note: {note}: {problem}\n"


def test_a_gpu_is_named_by_its_kind(monkeypatch):
    """The first of that kind; another card of the chip after it, a part of a GPU only by the part's name."""
    gpus = [
        Platform("cuda", "sm_90", "cuda:0", "NVIDIA H100 PCIe"),
        Platform("cuda", "sm_90", "cuda:1", "NVIDIA H200 MIG 1g.18gb"),
        Platform("cuda", "sm_90", "cuda:2", "NVIDIA H200"),
        Platform("cuda", "sm_100", "cuda:3", "NVIDIA B200 MIG 1g.23gb"),
        Platform("cuda", "sm_90", "cuda:4", "NVIDIA H200 NVL"),
        Platform("cuda", "sm_90", "cuda:5", "NVIDIA H100 NVL"),
        Platform("cuda", "sm_80", "cuda:6", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"),
        Platform("cpu", "x86", "cpu", "EPYC"),
    ]
    numbers = {
        "H200": 2,
        "h200": 2,
        "CUDA:2": 2,
        "cuda": 0,
        "sm_90": 0,
        "sm_100": 3,
        "H100": 0,
        "H200 NVL": 4,
    }
    numbers |= {"h200 mig 1g.18gb": 1, "NVIDIA H200 MIG 1g.18gb": 1, "H100 NVL": 5, "H100 PCIe": 0, "NVL": 4}
    for module in (platform, device):
        monkeypatch.setattr(module, "devices", lambda: {gpu.device: gpu for gpu in gpus})
    for name, wanted in numbers.items():
        assert choose_device(name).device == f"cuda:{wanted}", name
    assert choose_device("CPU") == choose_device("cpu")
    for name in ("B200", "MI300X", "H20", "gfx942", "MIG", "EPYC"):
        with pytest.raises(UsageError) as error:
            choose_device(name)
        assert str(error.value).startswith(f"no device '{name}'; devices here: cuda:0 (NVIDIA H100 PCIe), ")
        assert str(error.value).endswith("(NVIDIA A100-SXM4-80GB MIG 1g.10gb), cpu")
    gpus[0] = replace(gpus[0], name="NVIDIA H200 MIG 2g.35gb")
    assert choose_device("sm_90").device == "cuda:2", "a whole GPU goes first"


def test_a_gpu_that_this_torch_was_not_built_for_is_not_measured(here, monkeypatch, tmp_path):
    """Nothing is recorded, whether or not the command names the device."""
    gpu = Platform("cuda", "sm_90", "cuda:0", "NVIDIA H200", memory=141 << 30)
    monkeypatch.setattr(platform, "devices", lambda: {"cuda:0": gpu, "cpu": detect("cpu")})
    monkeypatch.setattr(platform, "torch_build", lambda: "cpu")
    for named in ((), ("--device", "cuda:0")):
        line = error_line(here("run", *OP, *named, "--out", tmp_path / "run"), NOTHING_RAN)
        assert "is built for CPUs: cuda:0 needs its build for CUDA; install PyTorch's build for CUDA" in line
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("said", "version"), [
    ("580.95.05\n580.95.05", "580.95.05"),
    ("580.95.05\nUnable to determine the device handle for GPU1: Unknown Error", "580.95.05"),
    ("Failed to initialize NVML: Driver/library version mismatch", ""),
    ("", ""),
])  # fmt: skip
def test_a_failure_of_nvidia_smi_is_not_taken_for_a_version(monkeypatch, tmp_path, said, version):
    monkeypatch.setattr(device, "Path", lambda *parts: tmp_path.joinpath(*(p.strip("/") for p in parts)))
    monkeypatch.setattr(device, "smi", lambda *arguments: (said, said))
    assert device.driver(Platform("cuda", "sm_90", "cuda:0")) == version


def test_the_folder_of_locks_is_no_difference_between_runs_but_agents_get_it(monkeypatch):
    for name in ("KERNEL_BENCH_LOCKS", "KERNEL_BENCH_TUNED"):
        monkeypatch.setenv(name, "/some/folder")
    recorded = device.surroundings()["environment"]
    assert "KERNEL_BENCH_TUNED" in recorded and "KERNEL_BENCH_LOCKS" not in recorded
    assert ray_cluster._environment()["KERNEL_BENCH_LOCKS"] == "/some/folder"
