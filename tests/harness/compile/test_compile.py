"""`python -m harness compile`: what it says about a kernel, what it refuses, and that it compiles each
once."""

import dataclasses
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import kernels
from harness.catalogue.architectures import architectures, select_architectures
from harness.cli.compile import compile_on, compiled
from harness.compile import compiler, survey
from harness.compile.compiler import Product, Resources, resources_of
from harness.compile.launches import KernelLaunch, cases_of_suites, implementations, launches, narrowed
from harness.compile.survey import row, tile, violations
from harness.errors import UsageError
from kernels.mha_prefill.triton.flash import HEURISTIC
from kernels.operands import Seeds
from kernels.platform import version
from shapes.case import Case, parse
from shapes.suites import suite

pytestmark = pytest.mark.skipif(not version("triton"), reason="needs Triton")


def launch(**values: str) -> KernelLaunch:
    data = {"signature": {"x": "*fp32", "N": "constexpr"}, "constant_keys": [[1]], "constant_vals": [64],
            "attrs_keys": [[0]], "attrs_vals": [[["tt.divisibility", 16]]],
            "options": {"num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 0}}  # fmt: skip
    whole = {"op": "o", "implementation": "triton.x", "kernel": "m:k", "arch": "sm_90"}
    whole["data"] = json.dumps(data)
    return KernelLaunch(**whole | values)


LLVM = {64: 8, 68: 7, 74: 6, 102: 4, 120: 4, 130: 3, 156: 3, 222: 2, 240: 2, 264: 1, 400: 1}
"""Waves of a SIMD by registers: `; Occupancy` in the assembly of the suite's own kernels."""


@pytest.mark.parametrize(("arch", "registers", "shared", "columns", "waves", "resident", "bound"), [
    ("sm_90", 128, 0, 0, 4, 4, "registers"),  # 64 K registers of an SM / (128 * 128 threads)
    ("sm_90", 32, 0, 0, 4, 16, "registers"),
    ("sm_90", 24, 0, 0, 4, 16, "waves"),  # 64 warps
    ("sm_90", 24, 0, 0, 1, 32, "waves"),  # programs of one warp
    ("sm_90", 80, 0, 0, 1, 24, "registers"),  # of which each of four parts holds six
    ("gfx950", 74, 0, 0, 1, 24, "registers"),
    ("sm_90", 64, 100 << 10, 0, 4, 2, "shared"),
    ("sm_90", 64, 57 << 10, 0, 4, 3, "shared"),  # 228 KB, of which each program takes 1 KB more
    ("sm_100", 64, 1024, 256, 4, 2, "tensor memory"),
    ("gfx942", 128, 0, 0, 4, 4, "registers"),  # 512 of a lane / 128
    ("gfx942", 257, 0, 0, 4, 1, "registers"),
    ("gfx942", 32, 32 << 10, 0, 4, 2, "shared"),
    ("gfx950", 32, 32 << 10, 0, 4, 4, "shared"),  # of 160 KB, in steps of 1280 bytes
    *(("gfx950", registers, 0, 0, 4, waves, "registers") for registers, waves in LLVM.items()),
])  # fmt: skip
def test_what_a_unit_holds(arch, registers, shared, columns, waves, resident, bound):
    assert architectures()[arch].resident(registers, shared, columns, waves) == (resident, bound)


FINE = Resources(
    registers=128, shared_bytes=65536, threads=256, products=[Product(64, 128, 128, "fp8")],
    matrix_instructions=["wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"],
)  # fmt: skip
NARROW = Product(16, 64, 64, "bf16")
BOTH = [*FINE.matrix_instructions, "mma.sync.aligned.x"]


@pytest.mark.parametrize(
    ("arch", "changes", "why_older", "said"),
    [
        ("sm_90", {}, "", None),
        ("sm_90", {"registers": 256}, "", "takes 256 registers of a thread; sm_90 has 255"),
        ("sm_90", {"threads": 2048}, "", "takes 2048 threads"),
        ("sm_90", {"threads": 1024}, "", "1024 threads of 128 registers are more than a compute unit has"),
        ("sm_90", {"shared_bytes": 232449}, "", "bytes of shared memory; sm_90 has 232448"),
        ("gfx942", {"shared_bytes": 65537}, "", "bytes of shared memory; gfx942 has 65536"),
        ("sm_100", {"tensor_columns": 552}, "", "columns of tensor memory; sm_100 has 512"),
        ("sm_90", {"spills": 3, "scratch_bytes": 16}, "", "spills 3 registers: 16 bytes of scratch a thread"),
        ("sm_90", {"matrix_instructions": ["mma.sync.aligned.x"]}, "", "64x128x128 in fp8 without"),
        ("sm_90", {"products": [Product(64, 64, 64, "f32")]}, "", "no fast instruction"),
        ("sm_90", {"products": [NARROW], "matrix_instructions": []}, "", "undeclared"),
        ("sm_90", {"products": [NARROW], "matrix_instructions": []}, "few", "that it declares"),
        ("sm_90", {"products": [NARROW], "matrix_instructions": ["mma.sync.y"]}, "few", None),
        ("sm_90", {"matrix_instructions": BOTH}, "", "has mma"),
        ("sm_90", {"products": [*FINE.products, NARROW], "matrix_instructions": BOTH}, "few", None),
        ("gfx942", {"products": [NARROW], "matrix_instructions": ["v_mfma_f32_x"]}, "few", "without gfx942"),
        ("gfx950", {"matrix_instructions": ["v_mfma_f32_16x16x32_fp8_fp8"]}, "", "gfx950's instruction"),
        ("gfx950", {"matrix_instructions": ["v_mfma_f32_16x16x128_f8f6f4"]}, "", None),
        ("sm_90", {"error": "compiling failed: E"}, "", "compiling failed: E"),
        ("sm_90", {"remarks": ["wgmma.mma_async instructions are serialized"]}, "", "serialized"),
    ],
)  # fmt: skip
def test_what_may_not_be_shipped(arch, changes, why_older, said):
    if arch != "sm_90" and "matrix_instructions" not in changes:
        changes = changes | {"products": []}
    figures = dataclasses.replace(FINE, **changes)
    found = violations(launch(arch=arch, why_older=why_older), figures, architectures()[arch])
    assert (said is None and not found) or any(said in each for each in found), found


def test_a_row_of_the_survey_is_as_committed(snapshot):
    wave = {"matrix_instructions": ["v_mfma_f32_16x16x128_f8f6f4"], "registers": 64, "shared_bytes": 4096}
    of_each = (
        ("sm_90", {}),
        ("sm_90", {"registers": 256, "threads": 2048}),
        (
            "sm_100",
            {"products": [], "tensor_columns": 256, "code_bytes": 300, "shared_bytes": 1024, "registers": 64},
        ),
        ("gfx950", wave),
        ("gfx950", wave | {"spills": 4, "scratch_bytes": 16, "registers": 512}),
    )
    made = [
        row(launch(arch=arch, cases=["m=1"]), dataclasses.replace(FINE, **changes))
        for arch, changes in of_each
    ]
    snapshot(Path(__file__).parent / "snapshots" / "survey.json", json.dumps(made, indent=1) + "\n")


def test_a_launch_says_its_configuration_and_its_arguments():
    assert (launch().config, launch().arguments) == ("N=64 num_warps=4 num_stages=2", "x=*fp32:16")


def test_what_another_triton_makes_of_it_is_told(monkeypatch, tmp_path: Path):
    of = {"kernel": "k", "target": "sm_90", "config": launch().config, "arguments": launch().arguments}
    other = of | {"kernel": "j", "triton": "3.5.0", "reason": "of another kernel"}
    entries = [of | {"triton": "3.6.0", "reason": "spills"}, other]
    (tmp_path / "refused.json").write_text(json.dumps({"refused": entries}))
    monkeypatch.setattr(survey, "REFUSED", tmp_path / "refused.json")
    survey._refused.cache_clear()
    assert violations(launch(), FINE, architectures()["sm_90"]) == ["under Triton 3.6.0: spills"]
    survey._refused.cache_clear()


TTIR = "%3 = tt.dot %0, %1, %2 : tensor<16x64xbf16> * tensor<64x128xbf16> -> tensor<16x128xf32>"
FNUZ = TTIR.replace("bf16", "f8E4M3FNUZ")
PTX = ".reqntid 128, 1, 1\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}"
SLOWER = "wgmma.mma_async instructions are serialized due to insufficient register resources"
PTXAS = f"""ptxas info    : (C7510) Potential Performance Loss: {SLOWER} in function 'k'
ptxas info    : (C7510) Potential Performance Loss: {SLOWER} in function 'k'
ptxas info    : Function properties for k
    48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers"""
AMDGCN = """v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0
; codeLenInByte = 300
; TotalNumVgprs: 168
    .max_flat_workgroup_size: 128
    .private_segment_fixed_size: 48
    .vgpr_spill_count: 10"""


def elf(*sections: tuple[int, int]) -> bytes:
    """An ELF file without contents: its header, and those of sections given as (flags, bytes)."""
    header = bytearray(64)
    struct.pack_into("<Q", header, 40, 64)
    struct.pack_into("<HH", header, 58, 64, len(sections))
    return bytes(header) + b"".join(
        struct.pack("<IIQQQQ24x", 0, 0, flags, 0, 0, size) for flags, size in sections
    )


@pytest.mark.parametrize(
    ("asm", "log", "instruction", "dtype", "columns"),
    [
        # Sections of code, of two functions, beside one of data.
        ({"ptx": PTX, "cubin": elf((6, 200), (3, 5000), (6, 100))}, PTXAS, PTX.split()[-2], "bf16", 256),
        ({"amdgcn": AMDGCN, "ttir": FNUZ}, "", "v_mfma_f32_16x16x16_bf16", "fp8", 0),
    ],
    ids=["ptxas", "LLVM"],
)
def test_resources_are_read_from_what_compilers_write(asm, log, instruction, dtype, columns):
    """ptxas gives spills in bytes, four for each register."""
    metadata = SimpleNamespace(shared=4096, **{"tmem_size": columns} if columns else {})
    compiled = SimpleNamespace(asm={"ttir": TTIR} | asm, metadata=metadata)
    assert resources_of(compiled, log) == Resources(
        registers=168, spills=10, scratch_bytes=48, shared_bytes=4096, threads=128, code_bytes=300,
        tensor_columns=columns, matrix_instructions=[instruction], products=[Product(16, 128, 64, dtype)],
        remarks=[SLOWER] if log else [],
    )  # fmt: skip


@pytest.mark.parametrize("op", kernels.OPS)
def test_empty_operands_are_as_those_with_values(op: str):
    """Shapes, strides and dtypes are compared for each boundary: they decide what is compiled."""
    it = kernels.OPS[op]
    for case in suite("smoke").cases(op)[:2]:
        sizes = it.sizes(case.sizes)
        empty = it.empty_operands(sizes, "meta")
        assert narrowed(it, implementations(op)[0], sizes).boundary == it.boundaries[0]
        for boundary in reversed(it.boundaries):
            real = it.operands(sizes, Seeds(), "cpu", boundary)
            assert empty.boundary == boundary
            shapes = [
                {name: (t.shape, t.stride(), t.dtype) for name, t in operands.tensors().items()}
                for operands in (empty, real)
            ]
            assert shapes[0] == shapes[1], case.text
            if boundary != it.boundaries[0]:
                empty = empty.narrowed()


def of_gemm(arch: str, name: str = "") -> list[KernelLaunch]:
    """The launches of one small case, of kernels whose names contain `name`."""
    case = Case("block_scale_gemm", parse("m=1 n=576 k=7168")[0])
    found = launches(case.op, select_architectures(arch)[0], [case])
    return [one for one in found if name in one.name]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_descriptors_are_told_and_compiled(arch: str):
    found, *_ = of_gemm(arch, "gemm_kernel")
    assert "a=tensordesc<fp8e4nv[16, 128]> " in found.arguments
    assert not compiler.compile_launch(found.kernel, arch, found.data).error


def test_it_is_compiled_once(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = of_gemm("gfx942", "sum_kernel")
    asked: list[int] = []

    def compile_each(todo):
        asked.append(len(todo))
        return ((key, compiler.compile_launch(one.kernel, one.arch, one.data)) for key, one in todo.items())

    died = Resources(error="the compiler died")
    failed = compiler.compile_all(found, lambda todo: ((key, died) for key in todo))
    assert failed[0].error, "which is not kept"
    first = compiler.compile_all(found * 2, compile_each)
    assert first[0] == first[1] and first[0].registers > 8 and not first[0].error
    again = compiler.compile_all(found, compile_each)
    assert asked == [1, 0] and again == first[:1]
    for broken in ("{", "{}"):
        next(tmp_path.glob("*/compile/*.json")).write_text(broken)
        assert compiler.compile_all(found, compile_each) == again
    assert compiler.key_of(found[0]) != compiler.key_of(dataclasses.replace(found[0], arch="gfx950"))


@pytest.mark.slow
def test_a_compiler_that_dies_costs_one_configuration(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "deadly.py").write_text(
        "import multiprocessing, os\n"
        "from kernels.quantise_jit import quantise_kernel as kernel\n"
        "if multiprocessing.parent_process(): os._exit(3)\n"
    )
    found = of_gemm("gfx942", "sum_kernel")
    dead = dataclasses.replace(found[0], kernel="deadly:kernel")
    results = compiler.compile_all([dead, *found])
    assert results[0].error == "compiling failed: the compiler died"
    assert not results[1].error and len(results) == 2
    assert len(list(tmp_path.glob("cache/*/compile/*.json"))) == 1, "a death is remembered"
    sys.modules.pop("deadly", None)


@pytest.mark.slow
def test_a_planted_configuration_fails_the_command(here, monkeypatch, tmp_path: Path):
    """One case is compiled, in this process."""

    def compiled(todo):
        return ((key, compiler.compile_launch(one.kernel, one.arch, one.data)) for key, one in todo.items())

    monkeypatch.setattr(compiler, "_compile_here", compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case = parse("batch=1 new=3200 heads=16")[0]
    monkeypatch.setattr(survey, "cases_of_suites", lambda op: [Case(op, case)])
    bad = dataclasses.replace(HEURISTIC["gfx942 bf16"], keys=128, stages=2)
    monkeypatch.setitem(HEURISTIC, "gfx942 bf16", bad)
    for targets, code in (("gfx942,gfx950", 1), ("gfx950", 0)):  # the latter from the cache
        done = here("compile", "--op", "mha_prefill", "--target", targets)
        assert done.returncode == code and "flash_kernel" in done.stdout, done.stderr
        assert ("bytes of shared memory; gfx942 has 65536" in done.stderr) == bool(code)
        assert "gfx950 mha_prefill" not in done.stderr, "a line of its own for each that must not be shipped"
    assert (
        here("compile", "--op", "mha_prefill", "--target", "gfx950", "--json", tmp_path / "x").returncode == 0
    )
    (found,) = json.loads((tmp_path / "x").read_text())["compiles"]
    assert (found["ok"], found["op"], found["target"]) == (True, "mha_prefill", "gfx950")


def test_targets_are_those_named_once_and_a_variable_that_interprets_is_refused(here, monkeypatch):
    assert [a.arch for a in select_architectures("sm_90, gfx942,sm_90")] == ["sm_90", "gfx942"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = here("compile")
    assert done.returncode == 2 and done.stderr.startswith("error: TRITON_INTERPRET=1 interprets")


@pytest.mark.slow
@pytest.mark.parametrize(("op", "target"), list(zip(kernels.OPS, architectures(), strict=True)))
def test_what_is_shipped_may_be(op, target):
    """Each op is compiled for one architecture. All ops for all architectures, with each dtype and alignment,
    take a quarter of an hour: run `compile` after a kernel was changed."""
    found = launches(op, architectures()[target], cases_of_suites(op))
    for launch in {(one.name, tile(one.config)): one for one in found}.values():
        made = row(launch, compiler.compile_launch(launch.kernel, target, launch.data))
        assert made["ok"] and made["registers"] > 0, made


OURS = version("triton")


def on_a_cluster(monkeypatch, theirs: str | None = OURS, waits: bool = False) -> dict[str, Resources]:
    """What two kernels come to on a cluster whose nodes have that Triton. The second one's node dies."""

    def on_a_node(launch: Mock, triton: str) -> Resources | str:
        monkeypatch.setattr("kernels.platform.version", lambda module: theirs)
        if launch.arch == "dies":
            raise OSError("it died")
        return compiled(launch, triton)

    ray = Mock(get=lambda reference: reference(), exceptions=Mock(RayError=OSError))
    ray.remote.return_value.options.return_value.remote = lambda *given: lambda: on_a_node(*given)
    ray.wait = lambda refs, **_: ([], refs) if waits else (refs[:1], refs[1:])
    monkeypatch.setattr("harness.cluster.ray_cluster.join", lambda _: ray)
    monkeypatch.setattr("harness.cluster.ray_cluster.require_head", Mock())
    monkeypatch.setattr("harness.cli.compile.FIRST_S", 0.0)
    monkeypatch.setattr(compiler, "compile_launch", lambda kernel, arch, data: Resources(error=arch))
    return dict(compile_on("auto")({arch: Mock(arch=arch) for arch in ("lives", "dies")}))


def test_where_a_node_dies_while_it_compiles_only_that_kernel_has_no_result(monkeypatch):
    made = on_a_cluster(monkeypatch)
    assert made["lives"] == Resources(error="lives")
    assert made["dies"] == Resources(error="compiling failed: its node gave OSError")


@pytest.mark.parametrize(("theirs", "said"), [("0.1", "has triton 0.1, "), (None, "has triton missing, ")])
def test_kernels_are_compiled_where_nodes_have_this_triton(monkeypatch, theirs, said):
    with pytest.raises(UsageError, match=f"{said}the driver's machine {OURS}: make them alike$"):
        on_a_cluster(monkeypatch, theirs)


def test_a_cluster_whose_cpus_are_taken_is_not_waited_for(monkeypatch):
    with pytest.raises(UsageError, match=r"^no kernel was compiled within 0 s: are all CPUs taken\?$"):
        on_a_cluster(monkeypatch, waits=True)
