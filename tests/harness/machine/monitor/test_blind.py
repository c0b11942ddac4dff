"""A monitor that reads nothing says why, and the run goes on."""

import os
import sys

import pytest

from harness.machine.monitor import monitor_for
from harness.machine.monitor.amd import open_amd
from harness.machine.monitor.base import Blind
from harness.machine.monitor.nvidia import open_nvidia
from kernels.platform import Platform
from tests.support.fake_amdsmi import FakeAmdSmi
from tests.support.fake_nvml import FakeNvml

CPU = Platform("cpu", "arm64")
H100 = Platform("cuda", "sm_90", "cuda:0", "H100", uuid="GPU-aa")
MI300X, SECOND = (Platform("rocm", "gfx942", f"cuda:{number}", "MI300X") for number in (0, 1))
HIDDEN = {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}


def nvidia(platform=H100, code=None):
    nvml = FakeNvml()
    nvml.refused |= {"nvmlInit": code} if code else {}
    return lambda: open_nvidia(platform, list, nvml)


def amd(nodes=(1,), platform=MI300X, environment=(), code=None):
    smi = FakeAmdSmi(nodes)
    smi.refused |= {"amdsmi_init": code} if code else {}
    return lambda: open_amd(platform, list, smi, dict(environment))


@pytest.mark.parametrize(("opened", "reason"), [
    (lambda: monitor_for(CPU, list), "not Linux"),
    (lambda: monitor_for(H100, list), "nvidia-ml-py is not installed"),
    (nvidia(code=9), "NVML: Driver Not Loaded"),
    (nvidia(Platform("cuda", "sm_90", "cuda:1", uuid="")), "the UUID of cuda:1 is not known"),
    (nvidia(Platform("cuda", "sm_90", "cuda:1", uuid="GPU-zz")), "NVML: Not Found"),
    (lambda: monitor_for(MI300X, list), "amdsmi is not installed"),
    (amd(code=34), "amdsmi: AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded"),
    # amdsmi shows none beside a torch that has its own library (pytorch/pytorch#186516).
    (amd(()), "amdsmi shows no device: it is not of this ROCm, whose own is in share/amd_smi"),
    (amd((1,), SECOND), "amdsmi shows 1 devices: cuda:1 is none of these"),
    (
        amd((1, 2), SECOND, HIDDEN),
        "amdsmi shows 2 devices, of which ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES leave 1: "
        "cuda:1 is none of these",
    ),
])  # fmt: skip
def test_the_reason_why_nothing_is_read(monkeypatch, opened, reason):
    monkeypatch.delattr(os, "sched_getaffinity")
    for library in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, library, None)
    monitor = opened()
    assert isinstance(monitor, Blind)
    monitor.begin()
    monitor.sample("anything")
    assert (monitor.end(), monitor.blocked()) == ("", "")
    assert monitor.complaints() == [f"clocks not read: {reason}"]
    assert monitor.take_conditions() == {"not_read": {"clocks": reason}}
    assert monitor.current_values() == {"clocks": f"not readable: {reason}"}


def test_a_library_that_finds_no_driver_library_prints_nothing_on_stdout(monkeypatch, tmp_path, capsys):
    """amdsmi 7.0.2 without ROCm prints on import, then raises KeyError. Our stdout may be JSON."""
    (tmp_path / "amdsmi.py").write_text("print('Unable to find')\nraise KeyError('libamd_smi.so')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    said = "clocks not read: amdsmi cannot be imported: KeyError: 'libamd_smi.so'"
    assert monitor_for(MI300X, list).complaints() == [said]
    assert capsys.readouterr().out == ""
