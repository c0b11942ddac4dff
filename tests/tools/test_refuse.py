"""What one version of Triton must not ship is shipped with none."""

from __future__ import annotations

import json

import pytest
from refuse import refuse

from harness.catalogue.architectures import architectures
from harness.compile import limits
from harness.compile.launches import KernelLaunch
from harness.compile.resources import Resources

DATA = json.dumps({
    "signature": {"x": "*fp32", "BLOCK_M": "constexpr"}, "constant_keys": [[1]], "constant_vals": [64],
    "attrs_keys": [], "attrs_vals": [], "options": {"num_warps": 4, "num_stages": 2},
})  # fmt: skip
LAUNCH = KernelLaunch("block_scale_gemm", "triton.x", "kernels.x:gemm_kernel", "gfx942", DATA)


@pytest.fixture
def known(tmp_path, monkeypatch):
    data = tmp_path / "refused.json"
    data.write_text(json.dumps({"about": "", "refused": []}))
    monkeypatch.setattr(limits, "REFUSED", data)
    limits._refused.cache_clear()
    yield data
    limits._refused.cache_clear()


def test_what_another_version_spills_is_refused_here(known, tmp_path):
    row = {
        "kernel": "gemm_kernel",
        "target": "gfx942",
        "config": LAUNCH.config,
        "arguments": LAUNCH.arguments,
        "ok": False,
        "reason": "spills",
    }
    fine = row | {"config": "BLOCK_M=32", "ok": True, "reason": ""}
    written = tmp_path / "compiled.json"
    written.write_text(json.dumps({"triton": "3.6.0", "compiles": [row, fine]}))
    gfx942 = architectures()["gfx942"]
    figures = Resources(registers=64, threads=256)
    assert limits.violations(LAUNCH, figures, gfx942) == []
    limits._refused.cache_clear()
    assert refuse(written, known) == 1
    assert refuse(written, known) == 0, "it is known by now"
    assert limits.violations(LAUNCH, figures, gfx942) == ["under Triton 3.6.0: spills"]
    other = KernelLaunch("block_scale_gemm", "triton.x", "kernels.x:gemm_kernel", "gfx950", DATA)
    assert limits.violations(other, figures, architectures()["gfx950"]) == []
