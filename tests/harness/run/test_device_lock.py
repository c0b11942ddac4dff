"""Who may measure beside whom."""

import os
from dataclasses import replace

import pytest

from harness.errors import NothingRan
from harness.run.device import LOCKS, device_lock
from kernels.platform import Platform

GPU = Platform("cuda", "sm_90", "cuda:0", "NVIDIA H100 80GB HBM3", uuid="GPU-aaaa")


def test_a_gpu_is_locked_however_it_is_numbered(monkeypatch, tmp_path):
    monkeypatch.setenv(LOCKS, str(tmp_path))
    with device_lock(GPU):
        pass
    (lock,) = tmp_path.iterdir()
    lock.write_text("12345678901234")  # of a process before, with a longer number
    with device_lock(GPU):
        with (
            pytest.raises(NothingRan, match=f"cuda:1 is being measured by process {os.getpid()};"),
            device_lock(replace(GPU, device="cuda:1")),
        ):
            pass
        with device_lock(replace(GPU, uuid="GPU-bbbb")):
            pass
        with (
            device_lock(replace(GPU, uuid="MIG-GPU-aaaa/1/0")),
            device_lock(replace(GPU, uuid="MIG-GPU-aaaa/2/0")),
        ):
            pass
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o666}, "another user's, too"
