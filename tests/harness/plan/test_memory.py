"""The memory that is planned for a case: groups of entries that fit, their bytes, and sets of operands."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernels
from harness.plan import memory
from harness.plan.entry import Entry
from harness.plan.memory import CONTEXT, GIB, MEMORY_SHARE, Memory, kept_references, memory_needed, rotation
from harness.plan.settings import Setting
from kernels.operands import Seeds
from kernels.platform import Platform
from shapes.suites import suites

OP = kernels.OPS["mla_decode"]
MOE, GEMM, PREFILL = (kernels.OPS[name] for name in ("fused_moe", "block_scale_gemm", "mha_prefill"))
CPU = Platform("cpu", "x86-avx512", features=frozenset({"avx512f", "avx512_bf16"}))


def entries(op: str, *names: str) -> list[Entry]:
    known = {i.name: i for i in kernels.implementations(op)}
    return [Entry(name, known[name], Setting(), "eager") for name in names]


def judge_memory(op, **sizes) -> int:
    """The bytes of the judge of a case on a CPU."""
    return Memory(op.case(sizes), CPU, "", "serving").judge_bytes


def groups(monkeypatch, free, baseline, members, copies=1, op=OP, **sizes):
    monkeypatch.setattr(memory, "free_memory", lambda platform: int(free))
    plan = Memory(op.case(sizes), CPU, baseline, "serving")
    together, too_large = plan.groups(members, copies)
    return [[c.name for c in group] for group in together], too_large


def test_entries_share_a_group_where_memory_allows_and_each_group_has_the_baseline(monkeypatch):
    sizes, names = {"batch": 64, "ctx": 4096}, ["torch.compile", "torch.naive", "torch.sdpa"]
    copies = rotation(OP, OP.sizes(sizes), "serving", 1 << 25).copies
    given = ("torch.sdpa", entries("mla_decode", *names), copies)
    together, too_large = groups(monkeypatch, 64 << 30, *given, **sizes)
    assert ([sorted(group) for group in together], too_large) == ([names], [])
    apart, too_large = groups(monkeypatch, 5 << 30, *given, **sizes)
    assert len(apart) == 2 and all("torch.sdpa" in group for group in apart) and not too_large
    none, too_large = groups(monkeypatch, 1 << 30, *given, **sizes)
    assert (none, sorted(c.name for c in too_large)) == ([], names)
    assert {c.status for c in too_large} == {"unsupported"} and all("GiB" in c.reason for c in too_large)


def test_an_entry_that_does_not_fit_beside_the_baseline_is_alone(monkeypatch):
    two = entries("fused_moe", "torch.bf16", "torch.compile")
    sizes = MOE.sizes({"tokens": 64})
    pair = judge_memory(MOE, tokens=64) + memory_needed(MOE, sizes, [two[0]] * 2, 1)
    free = 1.01 * pair / MEMORY_SHARE["cpu"]
    result = groups(monkeypatch, free, "torch.bf16", two, op=MOE, tokens=64)
    assert result == ([["torch.bf16"], ["torch.compile"]], [])


def test_memory_counts_each_copy_and_a_shared_layout_once():
    (naive,) = entries("mla_decode", "torch.naive")
    sizes = OP.sizes({"batch": 4, "ctx": 512})
    one, nine = (memory_needed(OP, sizes, [naive], copies) for copies in (1, 9))
    assert nine - one == 8 * (OP.streamed_bytes(sizes) + OP.output_bytes(sizes) + naive.impl.workspace(sizes))
    sizes = MOE.sizes({"tokens": 64})
    bf16, compiled = entries("fused_moe", "torch.bf16", "torch.compile")
    assert bf16.impl.layout(sizes) == compiled.impl.layout(sizes) > 0
    one = memory_needed(MOE, sizes, [bf16], 1)
    more = memory_needed(MOE, sizes, [bf16, compiled], 1) - one
    assert more == compiled.impl.scratch(sizes) + 3 * MOE.output_bytes(sizes)
    nine = memory_needed(MOE, sizes, [bf16], 9)
    outputs = 2 * MOE.output_bytes(sizes)  # of sets that differ each one's is kept to compare others with
    assert nine - one == 8 * (MOE.turn_bytes(sizes) + bf16.impl.workspace(sizes) + outputs)


def test_a_composed_call_needs_memory_for_the_output_of_its_producer():
    sizes = GEMM.sizes({"m": 4096, "n": 128, "k": 512})
    split_k, bf16 = entries("block_scale_gemm", "triton.split_k", "torch.bf16")
    for row, quantised in ((split_k, sizes.quantised_bytes), (bf16, 0)):
        core, wide = (memory_needed(GEMM, sizes, [row], 3, boundary=b) for b in ("core", "with_quant"))
        assert wide - core == 3 * quantised


def test_calls_on_further_sets_share_scratch_and_graphs_have_their_own():
    sizes = OP.sizes({"batch": 4, "ctx": 512})
    eager, graph = (entries("mla_decode", "torch.naive") for _ in range(2))
    graph[0].launch = "graph"
    scratch = eager[0].impl.scratch(sizes)
    one, graphs = (memory_needed(OP, sizes, launched, 1) for launched in (eager, graph))
    assert graphs - one == scratch > OP.operand_bytes(sizes)
    assert memory_needed(OP, sizes, eager, 2) - one < scratch / 2
    sizes = GEMM.sizes({"m": 4096, "n": 128, "k": 512})
    eager, graph = (entries("block_scale_gemm", "cublaslt") for _ in range(2))
    graph[0].launch = "graph"
    one, graphs = (memory_needed(GEMM, sizes, launched, 3) for launched in (eager, graph))
    assert graphs - one == 3 * GEMM.output_bytes(sizes)


@pytest.mark.parametrize("mode", ["serving", "cold"])
def test_memory_while_operands_move_to_fresh_buffers_is_planned(mode):
    """All old sets and the first new one are there at once; in cold mode they share nothing."""
    op = kernels.OPS["fused_moe"]
    sizes = op.sizes({"tokens": 8, "experts": 32, "hidden": 512, "inter": 128})
    first = op.make(sizes, Seeds(), "cpu")
    sets = [first, *(first.turned(sample, mode == "cold") for sample in (1, 2)), first.copy()]
    storages = (t.untyped_storage() for operands in sets for t in operands.tensors().values())
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert held == pytest.approx(memory_needed(op, sizes, [], 3, mode), rel=0.1)


def test_interpreted_entries_take_memory_after_the_timed_ones(monkeypatch):
    """They run on one set of operands when the workers of timed entries have ended, so no group is split."""
    sizes = {"batch": 64, "ctx": 4096}
    sdpa, triton = entries("mla_decode", "torch.sdpa", "triton.split_kv")
    triton.interpreted = True
    plan = Memory(OP.case(sizes), CPU, "torch.sdpa", "serving")
    assert plan.needed([sdpa, triton], 5) == plan.needed([sdpa], 5)
    assert plan.needed([triton], 5) == plan.needed([triton], 1) > judge_memory(OP, **sizes)


@pytest.mark.parametrize(
    ("kind", "arch", "mebibytes"),
    [("cuda", "sm_90", 32), ("cuda", "sm_100", 32), ("rocm", "gfx942", 204), ("rocm", "gfx90a", 108)],
)
def test_every_process_has_a_context_and_workspaces_on_each_of_its_streams(kind, arch, mebibytes):
    """The judge has one stream; the two workers, of torch and of vLLM, have a second one for graphs."""
    group = entries("mla_decode", "torch.sdpa", "vllm.triton")
    case = OP.case({"batch": 4, "ctx": 512})
    plan = Memory(case, Platform(kind, arch, memory=1 << 40), "torch.sdpa", "serving")
    plan.reference_bytes = 0
    workers = [[group[0]] * 2, [group[1]]]
    own = sum(memory_needed(OP, plan.sizes, members, 3) for members in workers)
    assert plan.needed(group, 3) - own == 3 * CONTEXT + (5 * mebibytes << 20)


def h100(monkeypatch, op, given, free=80 * GIB) -> Memory:
    monkeypatch.setattr(memory, "free_memory", lambda platform: free)
    platform = Platform("cuda", "sm_90", "cuda:0", "NVIDIA H100 80GB HBM3", memory=80 * GIB, here=False)
    return Memory(op.case({**op.defaults("sm_90"), **given}), platform, op.baseline["cuda"], "serving")


def test_a_reference_is_computed_beside_one_set_of_operands(monkeypatch):
    sdpa = entries("mla_decode", "torch.sdpa")
    plan = h100(monkeypatch, OP, {"batch": 4, "ctx": 512})
    plan.reference_bytes = 0
    one, nine = (plan.needed(sdpa, copies) for copies in (1, 9))
    plan.reference_bytes = nine - one + GIB
    assert [plan.needed(sdpa, copies) for copies in (1, 9)] == [nine + GIB, nine + GIB]
    plan.reference_bytes = nine - one - 1
    assert [plan.needed(sdpa, copies) for copies in (1, 9)] == [nine - 1, nine]

    large = h100(monkeypatch, OP, {"batch": 64, "ctx": 4096})
    computing = OP.operand_bytes(large.sizes) + OP.reference_bytes(large.sizes)
    one = 2 * CONTEXT + memory_needed(OP, large.sizes, sdpa * 2, 1)
    assert one + computing <= large.needed(sdpa, 1) < one + computing + GIB
    # Only free memory of a GPU is planned with; None: no tool says how much is free.
    for free, fits in ((80 * GIB, True), (GIB, False), (0, False), (None, True)):
        assert h100(monkeypatch, OP, {"batch": 64, "ctx": 4096}, free=free).fits(sdpa, 1) == fits


@pytest.mark.parametrize("name", sorted(kernels.OPS))
def test_four_references_of_two_boundaries_take_16_bytes_an_element(monkeypatch, name):
    op = kernels.OPS[name]
    (case, *_) = suites()["smoke"].cases(name)
    sizes = op.sizes(case.sizes)
    elements = op.empty_output(sizes, "meta").numel()
    whole = 4 * len(op.boundaries[:2]) * 16 * elements
    assert kept_references(op, sizes, "cpu") == whole
    monkeypatch.setattr(memory, "MOST_ELEMENTS", elements / 2)
    assert kept_references(op, sizes, "cpu") == whole / 2
    monkeypatch.setitem(memory.MAX_FLOPS, "cpu", op.work(sizes).flops / 4)
    assert [kept_references(op, sizes, kind) for kind in ("cpu", "cuda")] == [whole / 4, whole / 2]


@pytest.mark.parametrize("name", sorted(kernels.OPS))
def test_no_case_of_production_is_refused_on_80_gb(monkeypatch, name):
    """References are kept on the host. The device holds one while it is computed."""
    op = kernels.OPS[name]
    rows = [i.name for i in kernels.implementations(name) if i.runtime in ("torch", "triton")]
    for case in suites()["r1-tp8"].cases(name):
        plan, group = h100(monkeypatch, op, case.sizes), entries(name, *rows)
        fits = functools.partial(plan.holds, group)
        sets = rotation(op, plan.sizes, "serving", 50 << 20, fits=fits)
        _, too_large = plan.groups(group, sets.copies)
        assert not too_large, (case, [c.reason for c in too_large])


def test_a_share_of_memory_applies_to_a_cpu_alone(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda platform: 64 * GIB)
    case = OP.case({"batch": 4, "ctx": 512})
    for kind, part in (("cpu", 0.5), ("cuda", 1)):
        whole, half = (Memory(case, Platform(kind, "x"), "", "warm", share).usable for share in (1, 0.5))
        assert half == part * whole


def test_settings_that_do_not_fit_together_are_grouped_with_the_first_and_its_rerun(monkeypatch):
    (sdpa,) = entries("mla_decode", "torch.sdpa")
    settings = [Setting(), *(Setting({"A": str(i)}) for i in range(4)), Setting(is_rerun=True)]
    group = [Entry(setting.name, sdpa.impl, setting, "eager") for setting in settings]
    sizes = OP.sizes({"batch": 64, "ctx": 4096})
    four = judge_memory(OP, batch=64, ctx=4096) + 4 * memory_needed(OP, sizes, [sdpa], 1)
    free = 1.01 * four / MEMORY_SHARE["cpu"]
    together = [["plain", "plain (again)", f"A={i}", f"A={i + 1}"] for i in (0, 2)]
    assert groups(monkeypatch, free, "torch.sdpa", group, batch=64, ctx=4096) == (together, [])


ROTATED = OP.sizes({"batch": 8, "ctx": 1024})
TOUCHED = OP.streamed_bytes(ROTATED)


def rotations() -> Iterator[tuple[str, memory.Rotation]]:
    """Rotations, each with what is special about it."""
    yield "a last level of ten sets", rotation(OP, ROTATED, "serving", 10 * TOUCHED)
    yield "a last level of half a set", rotation(OP, ROTATED, "serving", TOUCHED // 2)
    yield "one that is not known", rotation(OP, ROTATED, "serving", 0)
    # Reading so many sets again and again was measured to be as slow as memory.
    for reach in (12, 20, 30):
        yield f"measured to {reach} sets", rotation(OP, ROTATED, "serving", 10 * TOUCHED, reach * TOUCHED)
    yield "warm", rotation(OP, ROTATED, "warm", TOUCHED)
    yield "cold: activations move, too", rotation(OP, ROTATED, "cold", 10 * TOUCHED)
    yield "touching too little", rotation(OP, OP.sizes({"batch": 1, "ctx": 1}), "serving", 1 << 30)
    for room in (0, 1, 2, 5):
        held = rotation(OP, ROTATED, "serving", 10 * TOUCHED, fits=lambda copies, most=room: copies <= most)
        yield f"memory for {room}", held
    # At 128 000 tokens the activations, a GB, push the weights out of 50 MB, so two sets are enough.
    for m in (1, 128000):
        sizes = GEMM.sizes({"m": m, "n": 3072, "k": 1536})
        yield f"a GEMM of {m} rows", rotation(GEMM, sizes, "serving", 50 << 20)
    sizes = PREFILL.sizes({"batch": 1, "new": 3200})
    yield "a prefill streams nothing", rotation(PREFILL, sizes, "serving", 50 << 20)
    # At one token a call touches 8 of 256 experts; further sets route to other experts.
    yield "experts of one token", rotation(MOE, MOE.sizes({"tokens": 1}), "serving", 32 << 20)


def test_rotations_are_as_committed(snapshot):
    lines = [
        f"{name}: {of.mode}, {of.copies} sets of {of.bytes} bytes, last level {of.last_level}, "
        f"{'enough' if of.enough else 'not enough'}{f': {of.why}' if of.why else ''}"
        for name, of in rotations()
    ]
    snapshot(Path(__file__).parent / "snapshots" / "rotations.txt", "\n".join(lines) + "\n")
    assert rotation(OP, ROTATED, "serving", 0) == rotation(OP, ROTATED, "serving", memory.UNKNOWN_LEVEL)
