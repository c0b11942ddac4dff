"""What ran beyond its name."""

import hashlib
import os
import sys
import weakref
from types import SimpleNamespace

import pytest

from harness.workers.child.profile import fingerprint, onednn_names

VERBOSE = """
onednn_verbose,v1,info,oneDNN v3.7.1
onednn_verbose,v1,primitive,create:cache_miss,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16,,,64x512,1.2
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16,,,64x512:512x512,0.02
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16,,,64x512:512x512,0.02
onednn_verbose,primitive,exec,cpu,inner_product,gemm:jit,forward_inference,src_f32,,,mb1ic2oc3,0.1
something else
"""


def test_names_of_onednns_lines():
    """As versions 2 and 3 write them; what is only created did not run."""
    assert onednn_names(VERBOSE.splitlines()) == [
        "onednn matmul brg_matmul:avx512_core_bf16",
        "onednn inner_product gemm:jit",
    ]
    assert onednn_names([]) == ["onednn none"]


def test_a_product_of_bf16_names_its_implementation(capfd):
    """And whether the call fails or not, standard output is given back."""
    torch = pytest.importorskip("torch")
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN takes no bf16 here")
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 512).bfloat16()
    (found,) = fingerprint(lambda: a @ b, "cpu", [])
    assert found.startswith("onednn matmul ")
    assert fingerprint(lambda: a + a, "cpu", []) == ["onednn none"]
    with pytest.raises(IndexError):
        fingerprint(lambda: [][0], "cpu", [])
    print("still here")
    sys.stdout.flush()
    os.write(1, b"and here\n")
    assert capfd.readouterr().out == "still here\nand here\n"


class CompiledKernel:
    """As triton.compiler has it."""

    def __init__(self, name: str, code: bytes) -> None:
        self.metadata, self.asm = SimpleNamespace(name=name), {"cubin": code}


class JITFunction:
    """As triton.runtime.jit has it: what it launches it returns."""

    def __init__(self, compiled: CompiledKernel) -> None:
        self.compiled = compiled

    def run(self) -> CompiledKernel:
        return self.compiled


@pytest.fixture
def triton(monkeypatch):
    for name, held in (("triton", {}), ("triton.compiler", {"CompiledKernel": CompiledKernel})):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**held))
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", SimpleNamespace(JITFunction=JITFunction))


def test_a_kernel_that_was_compiled_for_other_sizes_is_not_named(triton):
    """The cases of smoke sizes that are checked before compile the same kernel."""
    kept = [CompiledKernel("gemm_kernel", b"small"), CompiledKernel("gemm_kernel", b"large")]
    launched = JITFunction(kept[1])
    (found,) = fingerprint(lambda: launched.run(), "cuda", ["gemm_kernel"])
    assert found == f"code gemm_kernel {hashlib.sha256(b'large').hexdigest()[:12]}"
    assert fingerprint(lambda: launched.run(), "cuda", ["another"]) == []
    # torch.compile launches what it compiled by a launcher of its own.
    assert len(fingerprint(lambda: None, "cuda", ["gemm_kernel"])) == 2


def test_an_object_that_refers_to_nothing_any_more_costs_no_profile(triton):
    """torch.compile leaves weak proxies, which raise when they are asked for their class."""

    class Referent:
        pass

    referent = Referent()
    kept = [weakref.proxy(referent), CompiledKernel("gemm_kernel", b"machine code")]
    del referent
    (found,) = fingerprint(lambda: None, "cuda", ["gemm_kernel"])
    assert found.startswith("code gemm_kernel ")
    assert len(kept) == 2
