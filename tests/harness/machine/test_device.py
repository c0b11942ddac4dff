"""The device that a command names: found, or a mistake in one line with exit code 2, whatever the command."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from harness.errors import NOTHING_RAN, USAGE, UsageError
from harness.machine.device import choose_device
from harness.serving.experiment.execute import execute
from harness.serving.experiment.kernels import LocalBench
from harness.serving.experiment.spec import ReplaySettings
from kernels import platform
from kernels.platform import Platform, detect, devices
from tests.support.command_line import error_line

OP = ("--op", "mla_decode", "--case", "batch=1 ctx=4 heads=4")
REPLAY = ("serving", "replay", "--model", "deepseek-r1", "--tp", "8", "--phase", "decode")


def test_the_first_device_is_chosen_where_none_is_named():
    assert choose_device() is next(iter(devices().values()))
    assert choose_device("cpu").kind == "cpu"


GPU = Platform("cuda", "sm_90", "cuda:0", memory=80 << 30)
MISMATCH, LOST = "nvidia-smi: Driver/library version mismatch", "NVML: GPU 3: GPU is lost"


@pytest.mark.parametrize(
    ("gpus", "problem", "note"),
    [
        ([], MISMATCH, "the CPU is measured, as no GPU can be"),
        ([GPU], LOST, "some GPUs cannot be used"),
        ([replace(GPU, memory=0)], LOST, "not all of the GPU is known"),
    ],
)
def test_a_gpu_that_is_not_seen_is_never_passed_over_in_silence(monkeypatch, capsys, gpus, problem, note):
    monkeypatch.setattr(platform, "_gpus", lambda: (gpus, problem))
    platform.devices.cache_clear()
    try:
        assert choose_device() == (gpus[0] if gpus else choose_device("cpu"))
        with pytest.raises(UsageError, match=f"devices here: .*cpu; {problem}"):
            choose_device("cuda:7")
    finally:
        platform.devices.cache_clear()
    assert capsys.readouterr().err == f"note: {note}: {problem}\n"


def test_a_gpu_that_this_torch_was_not_built_for_is_not_measured(here, monkeypatch, tmp_path):
    """Of a CPU build nothing is recorded; a device that is named is treated alike."""
    gpu = Platform("cuda", "sm_90", "cuda:0", "NVIDIA H200", memory=141 << 30)
    monkeypatch.setattr(platform, "devices", lambda: {"cuda:0": gpu, "cpu": detect("cpu")})
    monkeypatch.setattr(platform, "torch_build", lambda: "cpu")
    for named in ((), ("--device", "cuda:0")):
        line = error_line(here("run", *OP, *named, "--out", tmp_path / "run"), NOTHING_RAN)
        assert "is built for CPUs: cuda:0 needs its build for CUDA; install PyTorch's build for CUDA" in line
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("run", *OP),
        ("toggle", *OP, "--flag", "VLLM_USE_V1=1"),
        ("compare", "--revisions", "HEAD", "HEAD~1", *OP),
        ("tune", "--op", "block_scale_gemm"),
        ("doctor", "--quick"),
        REPLAY,
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_an_unknown_device_exits_2(here, command, monkeypatch):
    monkeypatch.setattr("harness.plan.revisions.arms", lambda names: [])
    line = error_line(here(*command, "--device", "cuda:77"), USAGE)
    assert line.startswith("no device 'cuda:77'; devices here: ")


def test_an_unknown_device_of_an_experiment_exits_2(tmp_path):
    settings = ReplaySettings.model_construct(device="cuda:77", budget_s=1.0)
    step = SimpleNamespace(phase="decode")
    with pytest.raises(UsageError, match="no device 'cuda:77'; devices here: "):
        LocalBench(settings, False, print).replay(step, "other", {}, {})
    experiment = SimpleNamespace(engine=None, replay=settings)
    with pytest.raises(UsageError, match="no device 'cuda:77'; devices here: "):
        execute(experiment, tmp_path, [], False, print)
