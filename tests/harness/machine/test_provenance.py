"""The facts about the machine in a record."""

import pytest

from harness.machine import provenance
from kernels.platform import Platform


@pytest.mark.parametrize(("said", "version"), [
    ("580.95.05\n580.95.05", "580.95.05"),
    ("580.95.05\nUnable to determine the device handle for GPU1: Unknown Error", "580.95.05"),
    ("Failed to initialize NVML: Driver/library version mismatch", ""),
    ("", ""),
])  # fmt: skip
def test_a_failure_of_nvidia_smi_is_not_taken_for_a_version(monkeypatch, tmp_path, said, version):
    monkeypatch.setattr(provenance, "Path", lambda *parts: tmp_path.joinpath(*(p.strip("/") for p in parts)))
    monkeypatch.setattr(provenance, "smi", lambda *arguments: (said, said))
    assert provenance.driver(Platform("cuda", "sm_90", "cuda:0")) == version
