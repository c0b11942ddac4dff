"""The lock of a device: which runs may use it at the same time."""

import os
import re
import time
from dataclasses import replace

import pytest

from harness.errors import NothingRan
from harness.run.device import LOCKS, device_lock
from kernels.platform import Platform

GPU = Platform("cuda", "sm_90", "cuda:0", "NVIDIA H100 80GB HBM3", uuid="GPU-aaaa")


def refused(platform: Platform) -> str:
    with pytest.raises(NothingRan) as error, device_lock(platform):
        pass
    return str(error.value)


def test_a_gpu_is_locked_however_it_is_numbered(monkeypatch, tmp_path):
    """The error of the second run says which command holds the device, and since when."""
    monkeypatch.setenv(LOCKS, str(tmp_path))
    monkeypatch.setattr("time.time", lambda: 50_600.0)  # 3 minutes and 20 s after a full hour in most zones
    with device_lock(GPU):
        pass
    (lock,) = tmp_path.iterdir()
    lock.write_text("12345678901234" + 99 * "x")  # of an earlier process, with a longer text
    monkeypatch.setattr("sys.argv", ["/x/harness/__main__.py", "toggle", "--flag", "A=1 2", "ä" * 99])
    monkeypatch.setattr("harness.run.device.devices", lambda: {"cuda:0": GPU})
    with device_lock(GPU):
        said = refused(replace(GPU, device="cuda:1"))
        holder = (
            rf"`harness toggle --flag 'A=1 2' \.\.\.` \(process {os.getpid()}, since 1970-01-0[12] ..:.3\)"
        )
        assert re.fullmatch(f"device cuda:1 is being measured by {holder}; wait for it", said)
        monkeypatch.setattr("harness.run.device.devices", lambda: {"cuda:0": GPU, "cpu": GPU})
        assert refused(GPU).endswith("; wait for it, or choose another --device")
        lock.write_text(f"{os.getpid():<20}{time.mktime(time.localtime()):.0f} pytest")
        assert re.search(r"since (\d{4}-\d\d-\d\d )?\d\d:\d\d\)", refused(GPU))
        lock.write_text("4242")  # of a process that has written only its id
        assert "is being measured by process 4242; " in refused(GPU)
        lock.write_text("")
        assert "is being measured by process ?; " in refused(GPU)
        with device_lock(replace(GPU, uuid="GPU-bbbb")):
            pass
        with (
            device_lock(replace(GPU, uuid="MIG-GPU-aaaa/1/0")),
            device_lock(replace(GPU, uuid="MIG-GPU-aaaa/2/0")),
        ):
            pass
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o666}, "for all users"
