"""NVIDIA's attention libraries are found by their doubles."""

import pytest

from kernels import platform
from tests.doubles import lent


@pytest.mark.parametrize(
    ("double", "module", "version"),
    [
        ("flash_mla", "flash_mla", "1.0.0+9241ae3"),
        ("flash_mla_2025", "flash_mla", "1.0.0+ebf3064"),
        ("flashinfer_attention", "flashinfer", "0.6.18"),
        ("flash_attn", "flash_attn", "2.8.4"),
        ("flash_attn_3", "flash_attn_interface", "3.0.0"),
        ("flash_attn_4", "flash_attn.cute", "4.0.0b36"),
        ("cudnn_frontend", "cudnn", "1.23.0"),
    ],
)
def test_each_is_found_as_the_library_would_be(double, module, version):
    with lent("cuda", "sm_90", double) as here:
        assert here.library(module) and platform.version(module) == version
