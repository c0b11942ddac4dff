"""What the rows of each library need. A row takes its library's base class, and says what else it needs."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

from packaging.version import InvalidVersion, Version

from kernels.binding import Function, Operator, Symbol, Used, VendorFunction, load
from kernels.defects import known_defects
from kernels.formats import native, native_scales
from kernels.op import OPS, Implementation, Unsupported
from kernels.platform import LIBRARIES, Platform, version
from kernels.support import Support, need
from shapes.case import Case
from shapes.names import either

BLACKWELL = ("sm_100", "sm_103")
"""The data centre's Blackwell: B200 and B300."""

SINCE_AMPERE = ("sm_80", "sm_86", "sm_89", "sm_90", *BLACKWELL, "sm_120")


class Vendor(Implementation):
    """A kernel of a library."""

    # The kinds of platforms that it runs on.
    kinds: ClassVar[tuple[str, ...]] = ("cuda",)
    # Architectures that it is built for; empty: all of these platforms.
    archs: ClassVar[tuple[str, ...]] = ()
    # Instruction sets that a CPU must have.
    instructions: ClassVar[tuple[str, ...]] = ()
    # Further modules that it needs, beside torch and the library.
    also: ClassVar[Sequence[str]] = ()
    # Whether it takes either FP8 format. Otherwise it takes that of the architecture's matrix instructions.
    any_fp8: ClassVar[bool] = False
    # What it uses of its library: symbols, or tuples of which one must exist. `doctor --bind` checks these.
    symbols: ClassVar[Sequence[Used]] = ()
    # The library's first version that has these symbols; empty: any.
    since: ClassVar[str] = ""
    # The first versions of other libraries of which it uses something, by the library's name.
    others_since: ClassVar[Mapping[str, str]] = {}

    def available(self, platform: Platform) -> Support:
        archs = self.archs or (platform.arch,)
        return Support.all_of(
            platform.is_a(*self.kinds),
            need(platform.arch in archs, f"needs {either(archs)}; this is {platform.arch}"),
            platform.has(*self.instructions),
            platform.library("torch"),
            *map(platform.library, self.also),
            self.installed(platform),
            self.recent(platform),
        )

    def installed(self, platform: Platform) -> Support:
        return platform.library(self.library or self.provider)

    @property
    def first_versions(self) -> dict[str, str]:
        """By library, its first version that has what this row uses; empty: any."""
        return {self.library or self.provider: self.since, **self.others_since}

    def recent(self, platform: Platform) -> Support:
        """Whether the installed libraries have what this row uses. An unreadable version counts as recent."""
        for library, first in self.first_versions.items():
            if platform.here and is_older(version(library) or "", first):
                return Support(False, f"needs {library} {first} or later; this is {version(library)}")
        return Support(True)

    def supports(self, case: Case, platform: Platform) -> Support:
        native_format = native(platform.arch)
        case_format = case.sizes.get("fp8", native_format)  # a case without FP8 operands names no format
        takes_format = self.any_fp8 or case_format == native_format
        defects = known_defects(self, OPS[self.op].sizes(case.sizes), platform.arch)
        return Support.all_of(
            super().supports(case, platform),
            need(takes_format, f"{platform.arch} takes {native_format}, not {case_format}"),
            *(Support(False, str(defect)) for defect in defects if defect.refuse),
        )


def is_older(version: str, first: str) -> bool:
    """Whether a version is older than the version `first`. False where one of them cannot be read."""
    try:
        return Version(version) < Version(first)
    except InvalidVersion:
        return False


def releases_read(library: str) -> list[str]:
    """Releases of a library of which rows' authors read the source: the newest of each series."""
    return LIBRARIES.get(library, {}).get("read", [])


def last_read(library: str, version: str) -> str:
    """The newest of `releases_read` of the version's series, if the version is newer; else empty."""
    try:
        installed = Version(version)
    except InvalidVersion:
        return ""
    releases = [Version(release) for release in releases_read(library)]
    # A release with a higher major version belongs to another series.
    same_series = [release for release in releases if release.major <= installed.major]
    if same_series and Version(installed.public) > max(same_series):
        return str(max(same_series))
    return ""


class Aiter(Vendor):
    runtime = "aiter"
    library = "aiter"
    kinds: ClassVar[tuple[str, ...]] = ("rocm",)
    archs: ClassVar[tuple[str, ...]] = ("gfx942", "gfx950")


class Cudnn(Vendor):
    """NVIDIA's front end to cuDNN."""

    runtime = "cudnn"
    library = "cudnn"


class DeepGemm(Vendor):
    """DeepGEMM. It compiles for sm_103 as for sm_100 (csrc/jit/device_runtime.hpp of 2.6.1, get_arch).

    Each release of the wheel sgl-deep-gemm is built for one version of torch, which its metadata does not
    name. Under torch 2.11.0+cu130, 0.1.4.post1 loads; 0.2.3.post2 and 0.2.5 do not, as they need a symbol of
    a later torch. SGLang 0.5.23 requires 0.2.3.post2 with torch 2.14.1."""

    runtime = "deep_gemm"
    library = "deep_gemm"
    archs: ClassVar[tuple[str, ...]] = ("sm_90", *BLACKWELL)

    def supports(self, case: Case, platform: Platform) -> Support:
        return Support.all_of(super().supports(case, platform), takes_scales(case, platform))


def takes_scales(case: Case, platform: Platform) -> Support:
    """Whether DeepGEMM takes the case's block scales: on Blackwell only powers of two, elsewhere all."""
    scales = case.sizes.get("scales", "ue8m0")
    return need(
        native_scales(platform.arch) in ("fp32", scales),
        f"{platform.arch} takes power-of-two scales (scales=ue8m0), not {scales}",
    )


class FlashAttention(Vendor):
    """FlashAttention. Each generation is a package of its own. The calls of all allocate their output."""

    runtime = "flash_attn"
    allocates = True


class FlashAttention3(FlashAttention):
    library = "flash_attn_interface"
    archs: ClassVar[tuple[str, ...]] = ("sm_90",)


class FlashAttention4(FlashAttention):
    library = "flash_attn.cute"


class FlashInfer(Vendor):
    runtime = "flashinfer"
    library = "flashinfer"


class Sglang(Vendor):
    """SGLang's Triton kernels."""

    runtime = "sglang"
    library = "sglang"
    kinds: ClassVar[tuple[str, ...]] = ("cuda", "rocm")
    also: ClassVar[Sequence[str]] = ("triton",)

    # Where its attention kernels are now, and where they were before.
    ATTENTION = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")

    def environment(self, platform: Platform) -> dict[str, str]:
        """Switches off DeepGEMM, which is a row of its own, by the newer and the older name of the switch."""
        return {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "SGL_ENABLE_JIT_DEEPGEMM": "0"}


def extend_attention(when: str = "") -> Function:
    """SGLang's kernel for several query tokens of a sequence. Versions without `is_causal` are always causal.
    On ROCm `extend_seq_lens_cpu` makes a grid without idle programs. when: as for `Function`"""
    return Function(
        *(f"{ops}.extend_attention.extend_attention_fwd" for ops in Sglang.ATTENTION),
        needs="q_extend k_extend v_extend o_extend k_buffer v_buffer qo_indptr kv_indptr kv_indices "
        "custom_mask mask_indptr max_len_extend sm_scale",
        wishes="is_causal k_scale v_scale extend_seq_lens_cpu",
        when=when,
    )


class TileLang(Vendor):
    """The suite's own kernels in TileLang, compiled for the device when they are first prepared.

    Both engines require 0.1.12, and its compiler lowers all of them (tests/kernels/test_tilelang.py).
    Importing it beside apache-tvm-ffi 0.1.12 or later, which its metadata excludes, ends the process.
    """

    runtime = "tilelang"
    library = "tilelang"
    requires = (
        "TileLang 0.1.12 or later (read at 0.1.15), with nvcc or hipcc; sm_90, sm_100, gfx942 or gfx950"
    )
    kinds: ClassVar[tuple[str, ...]] = ("cuda", "rocm")
    archs: ClassVar[tuple[str, ...]] = ("sm_90", "sm_100", "gfx942", "gfx950")
    since = "0.1.12"

    # Compiles a program into a kernel.
    COMPILE = Function("tilelang.compile", "tilelang.jit.compile", needs="func")
    # The places of a kernel's call. Each row makes a Function of them with its kernel's number of arguments.
    CALL = ("tilelang.jit.kernel.JITKernel.__call__", "tilelang.JITKernel.__call__")

    symbols: ClassVar[Sequence[Used]] = (
        COMPILE,
        Symbol("tilelang.language.prim_func"),
        Symbol("tilelang.language.Tensor"),
        Function("tilelang.language.dynamic", positions=1),
        Function("tilelang.language.Kernel", positions=2, needs="threads"),
        Function("tilelang.language.alloc_shared", positions=2),
        Function("tilelang.language.alloc_fragment", positions=2),
        Function("tilelang.language.Parallel", positions=2),
        Function("tilelang.language.Pipelined", positions=1, needs="num_stages"),
        Function("tilelang.language.copy", positions=2),
        Function("tilelang.language.clear", positions=1),
        Function("tilelang.language.gemm", positions=3, needs="transpose_B"),
    )

    @staticmethod
    @functools.cache
    def compiled(module: str, source: str, *constants: Hashable) -> VendorFunction:
        """Compiles a TileLang program into a kernel. The function `source` of a module, both given by name,
        returns the program for these constants. Raises Unsupported or BindingError."""
        TileLang.COMPILE.at()  # raises where TileLang is missing, before the module imports it
        program = getattr(importlib.import_module(module), source)(*constants)
        return TileLang.COMPILE.bind(func=program)()


class Vllm(Vendor):
    """vLLM, by default its Triton kernels on GPUs."""

    runtime = "vllm"
    library = "vllm"
    kinds: ClassVar[tuple[str, ...]] = ("cuda", "rocm")
    also: ClassVar[Sequence[str]] = ("triton",)


class FlashAttentionOfVllm(Vendor):
    """FlashAttention 3 and 4 as vLLM ships them."""

    runtime = "vllm"
    library = "vllm"
    allocates = True


class FlashAttentionOfSglang(Vendor):
    """FlashAttention 3 as SGLang ships it."""

    runtime = "sgl_kernel"
    library = "sgl_kernel"
    allocates = True


_ISAS = "SSE41 AVX AVX2 AVX2_VNNI AVX2_VNNI_2 AVX512_CORE AVX512_CORE_VNNI AVX512_CORE_BF16"
ONEDNN_ISAS = _ISAS.split()
"""Values of ONEDNN_MAX_CPU_ISA (oneDNN's guide, CPU dispatcher control), up to what bf16 brgemm needs."""


def onednn_may_use(isa: str) -> Support:
    """Whether this process's environment lets oneDNN use an instruction set. isa: of ONEDNN_ISAS, or empty.
    oneDNN ignores case and unknown values, and reads DNNL_MAX_CPU_ISA where the newer variable is not set."""
    if not isa:
        return Support(True)
    too_low = ONEDNN_ISAS[: ONEDNN_ISAS.index(isa)]
    variable = "ONEDNN_MAX_CPU_ISA" if os.environ.get("ONEDNN_MAX_CPU_ISA") else "DNNL_MAX_CPU_ISA"
    limit = os.environ.get(variable, "").upper()
    return need(limit not in too_low, f"oneDNN needs {isa} for it, and {variable}={limit} forbids that")


def vllm_operator(name: str, positions: int) -> Operator:
    """An operator of vLLM's compiled module. positions: how many arguments it takes"""
    return Operator(f"vllm._C.{name}", positions, loader="vllm._custom_ops")


class VllmCpu(Vllm):
    """A kernel that vLLM serves DeepSeek with on x86-64 servers."""

    requires = "vLLM's CPU build, AVX-512 with bf16 (AMX tiles where the CPU has them)"
    kinds: ClassVar[tuple[str, ...]] = ("cpu",)
    # On a CPU without bf16 in AVX-512 vLLM loads another build. That lacks most of these kernels, truncates
    # to bf16 in the others (csrc/cpu/cpu_types_x86.hpp), and serves no FP8 model.
    instructions = ("avx512_bf16",)
    also = ()
    # The instruction set that oneDNN must be allowed to use; empty: the kernel does not call oneDNN. Without
    # it oneDNN throws in this kernel's threads, which ends the process.
    onednn_isa: ClassVar[str] = ""

    # Each of vLLM's builds for CPUs has at least one of these operators.
    OF_CPUS = ("init_cpu_memory_env", "init_cpu_threads_env", "cpu_attention_with_kv_cache", "onednn_mm")

    def available(self, platform: Platform) -> Support:
        support = super().available(platform)
        if platform.here:
            support = Support.all_of(support, onednn_may_use(self.onednn_isa))
        return support

    def require(self) -> None:
        # `available` asks the same in another process. Only this one has a variable that is under test.
        allowed = onednn_may_use(self.onednn_isa)
        if not allowed.ok:
            raise Unsupported(allowed.reason)
        load("vllm._custom_ops")
        if not any(vllm_operator(name, 0).exists() for name in self.OF_CPUS):
            raise Unsupported("this vllm is not its CPU build")
