"""What the suite's Triton kernels have in common: the interpreter, configurations, memory, compiling.

What they compute is in each op's test_triton.py.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.compiler import compile_launch
from harness.compile.launches import implementations, launches, recorded_launches
from harness.compile.survey import violations
from kernels import tuning
from kernels.fused_moe.providers import deep_gemm
from kernels.op import Prepared, Unsupported
from kernels.operands import Seeds
from kernels.platform import named
from kernels.triton_runtime import SuiteTriton
from kernels.tuning import TUNED
from shapes.case import Case, parse
from shapes.suites import suite

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

GEMM, MOE, MHA, MLA = kernels.OPS
# Of sizes between which the rules choose, and that need most memory.
TEXTS = {
    GEMM: ["m=1 n=2112 k=7168", "m=64 n=576 k=18432", "m=300 n=36864 k=256", "m=4096 n=2112 k=2048"],
    MOE: ["tokens=1", "tokens=64", "tokens=4096 ep=8 inter=2048 shared=1", "tokens=300 routing=one"],
    MHA: ["batch=1 new=1", "batch=7 new=1..600 heads=4", "batch=40 new=3200", "batch=7 new=1..600 dtype=fp8"],
    MLA: ["batch=1 ctx=131072", "batch=64 ctx=100..8192 heads=20", "batch=300 ctx=1..3 heads=128 kv=fp8"],
}
CASES = [(op, text) for op, texts in TEXTS.items() for text in texts]


@pytest.fixture(autouse=True)
def as_stored(
    request: pytest.FixtureRequest, no_stored_choices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the launches of these follow from what is stored, which always has a choice for them."""
    if request.node.name.partition("[")[2].startswith((GEMM, MOE)):
        monkeypatch.setattr(tuning, "TUNED", TUNED)
        tuning.stored_choices.cache_clear()


def row(op: str) -> SuiteTriton:
    return implementations(op)[0]


def sizes_of(op: str, text: str, arch: str = "cpu") -> Any:
    return kernels.OPS[op].sizes({**kernels.OPS[op].defaults(arch), **parse(text)[0]})


def empty(op: str, sizes: Any) -> tuple[Any, torch.Tensor]:
    """Operands and output on torch's meta device: shapes and types without memory."""
    operands = kernels.OPS[op].empty_operands(sizes, "meta")
    while operands.boundary != "core":
        operands = operands.narrowed()
    return operands, kernels.OPS[op].empty_output(sizes, "meta")


@pytest.mark.parametrize("op", kernels.OPS)
def test_a_cpu_needs_the_interpreter(op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    sizes = kernels.OPS[op].sizes(suite("smoke").cases(op)[0].sizes)
    operands = kernels.OPS[op].operands(sizes, Seeds(), "cpu")
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        row(op).prepare(operands, kernels.OPS[op].empty_output(sizes, "cpu"))
    for kind in ("cpu", "cuda", "rocm"):
        assert row(op).interpreted(named(kind)) == (kind == "cpu")
        assert ("TRITON_INTERPRET" in row(op).environment(named(kind))) == (kind == "cpu")


@pytest.mark.parametrize(("op", "text", "may"), [
    (MOE, "tokens=64 experts=40 topk=4 hidden=512 inter=128", True),
    (MOE, "tokens=64 experts=40 topk=4 hidden=512 inter=128 fp8=e4m3fnuz", False),
    (MOE, "tokens=16", False),
    (MHA, "batch=1 new=130 heads=2", True),
    (MHA, "batch=40 new=3200", False),
])  # fmt: skip
def test_what_takes_long_is_not_interpreted(op, text, may):
    case = kernels.OPS[op].case(parse(text)[0])
    support = row(op).supports(case, named("cpu"))
    assert support.ok == may and (may or "interpreting one call would take" in support.reason)
    assert row(op).supports(case, named("cuda")).ok


def allocated(prepared: Any, given: tuple[Any, ...]) -> int:
    """Bytes of the tensors that it holds, but for those that it was given."""

    def storages(value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()
        elif isinstance(value, dict | list | tuple):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from storages(inner)
        elif isinstance(value, partial):
            yield from storages([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, FunctionType):
            yield from storages([cell.cell_contents for cell in value.__closure__ or ()])
        elif isinstance(value, Prepared) or type(value).__module__.startswith("kernels."):
            yield from storages({n: v for n, v in getattr(value, "__dict__", {}).items() if n != "operands"})

    own = {storage._cdata: storage.nbytes() for storage in storages(prepared)}
    return sum(own[cdata] for cdata in own.keys() - {storage._cdata for storage in storages(given)})


@pytest.mark.parametrize("arch", ["gfx942", "sm_90", "sm_100"])
@pytest.mark.parametrize(("op", "text"), [
    *((op, text.replace("new=3200", "new=3200 heads=16")) for op, text in CASES),  # as for 128, and sooner
    (MOE, "tokens=512 experts=16 topk=8 ep=16 routing=zipf:1.2"),
])  # fmt: skip
def test_workspace_is_a_bound(op, text, arch):
    target, sizes = architectures()[arch].target, sizes_of(op, text, arch)
    configs, taken = list(row(op).configurations(target, sizes)), []
    for config in configs[:: max(1, len(configs) // 8)]:
        operands, out = empty(op, sizes)
        prepared = row(op).prepare_with(config, target, operands, out)
        taken.append(allocated(prepared, (operands.tensors(), out)))
        assert taken[-1] <= row(op).workspace(sizes), asdict(config)
    assert max(taken) > 0


@pytest.mark.parametrize("op", TEXTS)
def test_what_is_launched(op, snapshot):
    """Constants and options of each launch: a compiler takes many others, and computes the same."""
    lines = []
    for arch, architecture in architectures().items():
        found = launches(op, architecture, [Case(op, parse(text)[0]) for text in TEXTS[op]])
        assert found and len({(one.kernel, one.data) for one in found}) == len(found), "each is compiled once"
        for launch in found:
            options = json.loads(launch.data)["options"]
            more = [f" {n}={options[n]}" for n in ("kpack", "waves_per_eu") if options.get(n, 0) > 1]
            lines.append(
                f"{arch} {launch.name}, {'; '.join(launch.cases)}\n  {launch.config}{''.join(more)}\n"
            )
    snapshot(Path(__file__).parent / "figures" / f"{op}_launches.txt", "".join(lines))


# Compiled for GPUs that need not be here

GFX942, GFX950 = "v_mfma_f32_16x16x32_fp8_fp8", "v_mfma_f32_16x16x128_f8f6f4"
WGMMA, TCGEN05 = "wgmma.mma_async.sync.aligned.m64n", "tcgen05.mma.cta_group::1.kind::"
PREFILL, LONG = "batch=2 new=3200 prefix=0..70 heads=20", "ctx=4096 batch=4"
COMPILED = [
    # op, target, case, the kernel that multiplies with its instruction, and the others
    (GEMM, "gfx942", "m=64 n=2112 k=7216", "gemm", GFX942, "quantise"),
    (GEMM, "gfx950", "m=1 n=2112 k=7168", "gemm", GFX950, "quantise"),
    (GEMM, "sm_90", "m=1 n=2112 k=7168", "gemm", f"{WGMMA}16k32.f32.e4m3.e4m3", "quantise"),
    (GEMM, "sm_90", "m=1 n=2112 k=7000", "gemm", f"{WGMMA}16k32.f32.e4m3.e4m3", "sum quantise"),
    (GEMM, "sm_90", "m=4096 n=2112 k=7216", "gemm", f"{WGMMA}128k32.f32.e4m3.e4m3", "quantise"),
    (GEMM, "sm_100", "m=64 n=2112 k=7168", "gemm", f"{TCGEN05}f8f6f4", "quantise"),
    (MOE, "gfx942", "tokens=1", "up", GFX942, "silu down_by_token route quantise"),
    (MOE, "gfx942", "tokens=8192", "down", GFX942, "count place up combine route quantise"),
    (MOE, "gfx950", "tokens=64 shared=1", "up", GFX950, "place down combine route quantise"),
    (MOE, "sm_90", "tokens=1", "up", f"{WGMMA}16k32.f32.e4m3.e4m3", "silu down_by_token route quantise"),
    (MOE, "sm_100", "tokens=8192", "up", f"{TCGEN05}f8f6f4", "count place silu down combine route quantise"),
    (MHA, "gfx942", PREFILL, "flash", "v_mfma_f32_32x32x8_bf16", ""),
    (MHA, "gfx942", f"{PREFILL} dtype=fp8", "flash", "v_mfma_f32_32x32x16_fp8_fp8", "turn"),
    (MHA, "gfx950", f"{PREFILL} dtype=fp8", "flash", "v_mfma_f32_32x32x64_f8f6f4", ""),
    (MHA, "sm_90", PREFILL, "flash", f"{WGMMA}128k16.f32.bf16.bf16", ""),
    (MHA, "sm_90", f"{PREFILL} dtype=fp8", "flash", f"{WGMMA}128k32.f32.e4m3.e4m3", "turn"),
    (MHA, "sm_100", PREFILL, "flash", f"{TCGEN05}f16", ""),
    (MLA, "gfx942", f"{LONG} heads=16", "split", "v_mfma_f32_16x16x16_bf16", "combine"),
    (MLA, "gfx942", f"{LONG} heads=128 kv=fp8", "split", "v_mfma_f32_16x16x16_bf16", "combine"),
    (MLA, "gfx950", f"{LONG} heads=128", "split", "v_mfma_f32_16x16x32_bf16", "combine"),
    (MLA, "sm_90", f"{LONG} heads=128", "split", f"{WGMMA}256k16.f32.bf16.bf16", "combine"),
    (MLA, "sm_90", "ctx=4096 batch=450 page=1 kv=fp8", "split", "mma.sync.aligned.m16n8k16", ""),
    (MLA, "sm_100", f"{LONG} heads=128", "split", f"{TCGEN05}f16", "combine"),
]
QUICK = ("m=64 n=2112 k=7216", "tokens=1", PREFILL, f"{LONG} heads=16")


@pytest.mark.parametrize(("op", "target", "text", "kernel", "instruction", "others"), [
    pytest.param(*each, marks=() if each[1] == "gfx942" and each[2] in QUICK else pytest.mark.slow)
    for each in COMPILED
])  # fmt: skip
def test_compiles(op, target, text, kernel, instruction, others):
    architecture, found = architectures()[target], {}
    for launch in launches(op, architecture, [Case(op, parse(text)[0])]):
        name = launch.name.removesuffix("_kernel")
        found[name] = compile_launch(launch.kernel, target, launch.data)
        assert not violations(launch, found[name], architecture), launch.name
    assert set(found) == {kernel, *others.split()}
    figures = found[kernel]
    assert any(instruction in used for used in figures.matrix_instructions)
    if op == MLA and "heads=16" in text:
        waves = figures.threads // architecture.threads_per_wave
        of_a_unit = (figures.registers, figures.shared_bytes, figures.tensor_columns, waves)
        assert architecture.resident(*of_a_unit)[0] >= 2, "the rule leaves a unit one program"


# The kernels around DeepGEMM's products, which are checked with the library's double

LAYOUTS = {
    deep_gemm.contiguous: {"place", "gather", "silu", "combine"},
    deep_gemm.masked: {"masked", "gather", "silu", "combine"},
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def around_deep_gemm(layout: Any, text: str, arch: str, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    patch.setattr(deep_gemm.machine, "of", lambda device: named("cuda", arch))
    patch.setattr(deep_gemm, "first_of", lambda newer, older: older)
    patch.setattr(deep_gemm.ALIGNMENT, "bind", lambda: lambda: 128)
    for product in (deep_gemm.CONTIGUOUS, deep_gemm.MASKED):
        patch.setattr(product, "bind", lambda *given: partial(str))
    patch.setattr(deep_gemm.TRANSFORM, "bind", lambda **given: lambda: given["sf"])
    operands, out = empty(MOE, sizes_of(MOE, text))
    return layout().prepare(operands, out), (operands.tensors(), out)


@pytest.mark.slow
@each_layout
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_the_kernels_around_deep_gemm_compile(target, layout, monkeypatch):
    text = f"tokens=64 shared=1 scales={'ue8m0' if target == 'sm_100' else 'fp32'}"
    prepared, _ = around_deep_gemm(layout, text, target, monkeypatch)
    with recorded_launches(architectures()[target]) as calls:
        prepared.call()
    assert {kernel.partition(":")[2].removesuffix("_kernel") for kernel, _ in calls} == LAYOUTS[layout]
    for kernel, data in calls:
        figures = compile_launch(kernel, target, data)
        assert (figures.error, figures.scratch_bytes) == ("", 0), kernel


@each_layout
@pytest.mark.parametrize("text", TEXTS[MOE])
def test_the_workspace_around_deep_gemm_is_a_bound(layout, text, monkeypatch):
    prepared, given = around_deep_gemm(layout, text, "sm_90", monkeypatch)
    assert 0 < allocated(prepared, given) <= layout().workspace(sizes_of(MOE, text))


@pytest.mark.parametrize(("op", "large", "takes"), [
    (GEMM, "m=64000 n=2112 k=7168", "13 min"),
    (MOE, "tokens=64000", "52 min"),
    (MHA, "batch=8 new=8192", "18 min"),
    (MLA, "batch=100000 ctx=100000", "261 h"),
])  # fmt: skip
def test_what_takes_the_interpreter_too_long_the_smoke_suite_checks(op, large, takes):
    """As the reason says."""
    cpu, made, whole = named("cpu", "x86-avx512"), row(op), kernels.OPS[op].defaults("cpu")
    sizes = [whole | of.sizes for of in suite("smoke").cases(op)]
    assert all(made.supports(kernels.OPS[op].case(each, boundary="core"), cpu).ok for each in sizes)
    refused = made.supports(kernels.OPS[op].case(whole | parse(large)[0], boundary="core"), cpu)
    assert refused.reason == f"interpreting one call would take about {takes}: suite `smoke` checks it"
