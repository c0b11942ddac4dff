"""A worker's bench: which calls it makes, what it compares of them, and what it leaves behind."""

import gc
import itertools
import math
import mmap
import resource
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import kernels
from harness.workers.child import bench, device, profile
from harness.workers.child.bench import Bench
from harness.workers.child.timers import Program
from kernels.fused_moe.providers.torch_eager import bf16, compiled
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.op import Implementation, Prepared
from kernels.operands import Seeds
from kernels.support import Support
from shapes.case import Case

LONG_S = 1.0
Call = Callable[[], None]
SMALL = {"batch": 1, "ctx": 64}
GEMM = {"m": 4, "n": 128, "k": 128}
MOE = {"hidden": 256, "inter": 128}
SEEDS = asdict(Seeds(0, 0))


def opened(*guests: Implementation, op="mla_decode", sizes=SMALL, boundary="core", sets=0) -> Bench:
    """A bench with operands, in so many fresh buffers; a guest is prepared as `it`."""
    subject = Bench(*guests)
    subject.hello("cpu", "cpu", 1)
    subject.open(Case(op, sizes, boundary), SEEDS)
    if sets:
        subject.fresh("serving", sets)
    if len(guests) == 1:
        subject.prepare("it", guests[0].name, "eager")
    return subject


class Row(Implementation):
    """A right row of an op, unless `calls` does something else in a call's place, given a preparation, what a
    right call does and its number; `given` makes its operands of those that it is given."""

    name, requires = "guest", "a test"

    def __init__(self, calls=None, op="mla_decode", impl="torch.naive", given=None, name=name) -> None:
        self.calls, self.op, self.given, self.name = calls, op, given, name
        self.inner = next(i for i in kernels.implementations(op) if i.name == impl)

    def available(self, platform):
        return Support(True)

    def prepare(self, operands, out):
        prepared = self.inner.prepare(self.given(operands) if self.given else operands, out)
        if self.calls:
            compute, numbers = prepared.call, itertools.count(1)
            prepared.call = lambda: self.calls(prepared, compute, next(numbers))
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)


@pytest.mark.parametrize(("compiles", "calls"), [(1, [3, 3, 0, 0]), (2, [3, 3, 3, 3])])
def test_preparing_again_calls_no_more_than_it_needs(monkeypatch, compiles, calls):
    """Where the first call after preparing takes `compiles` times as long as others; anew for each case."""
    now, counted = 0.0, 0

    def compiled(prepared: Prepared, compute: Call, number: int) -> None:
        nonlocal now, counted
        now += LONG_S * (compiles if number == 1 else 1)
        counted += 1

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now)
    guest, made = Row(compiled, given=lambda operands: torch.set_num_threads(2) or operands), []
    subject = opened(guest, Row(name="another"))
    for case in (SMALL, SMALL | {"ctx": 65}):
        subject.open(Case("mla_decode", case), SEEDS)
        for _ in calls:
            subject.fresh("serving", 3)
            before = counted
            subject.prepare("it", Row.name, "eager")
            assert torch.get_num_threads() == 1, "whatever a library sets as it is imported"
            made.append(counted - before)
            for _ in range(2):
                subject.sample("it", LONG_S / 4)
    assert made == [*calls, *calls]


def test_bf16_weights_are_one_copy_that_goes_with_the_fp8_ones():
    subject = opened(op="fused_moe", sizes=MOE | {"tokens": 2, "experts": 4, "topk": 2})
    operands, out = subject.sets[0], subject.op.empty_output(subject.sizes, "cpu")
    prepared = [impl().prepare(operands, out) for impl in (bf16, bf16, compiled)]
    w13s = [prepared[0].stationary[0], prepared[1].stationary[0], prepared[2].stationary[0][0]]
    assert len({w13.data_ptr() for w13 in w13s}) == 1
    kept = weakref.ref(w13s[0])
    del prepared, operands, w13s
    gc.collect()
    assert kept() is not None
    subject.close()
    gc.collect()
    assert kept() is None


def test_what_converts_when_loaded_keeps_its_answer_to_another_cache():
    """However often it is asked."""

    class ConvertsWhenLoaded(Row):
        """Computes on a copy of the cache that is made when operands are loaded."""

        def prepare(self, operands, out):
            copy = operands.kv.clone()
            prepared = self.inner.prepare(operands.replaced(kv=copy), out)
            prepared.inputs = operands.live_tensors
            prepared.load = lambda live: [copy.copy_(live["kv"]), operands.q.copy_(live["q"])]
            return prepared

    subject = opened(ConvertsWhenLoaded())
    subject.prepare("it", Row.name, "eager", plugin=True)
    subject.load(asdict(Seeds(0, 1)))
    assert [subject.unread("it") for _ in range(2)] == [["kv"], ["kv"]]


def test_an_output_of_another_dtype_is_none():
    class Wide(Row):
        def prepare(self, operands, out):
            return Prepared(operands, out, self.inner.prepare(operands, out).call, result=out.float())

    with pytest.raises(TypeError, match=r"Wide\(\) gave torch.float32, and has to give torch.bfloat16"):
        opened(Wide()).output("it")


def test_who_is_prepared_after_operands_were_loaded_finds_them():
    """As where a worker was replaced because another entry crashed on these."""
    found = []
    for order in (("prepare", "load"), ("load", "prepare")):
        subject = opened(sets=2)
        for request in order:
            given = ("it", "torch.naive", "eager") if request == "prepare" else (asdict(Seeds(0, 1)),)
            getattr(subject, request)(*given)
        found.append((subject.digest(), subject.output("it")["output"]))
    assert found[0] == found[1]


@pytest.mark.parametrize(("free", "trims"), [(1 << 60, 0), (0, 1)])
def test_a_heap_gives_back_what_it_does_not_use_where_little_is_free(monkeypatch, free, trims):
    trimmed = []
    libc = SimpleNamespace(malloc_trim=trimmed.append)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(device, "available_memory", lambda: free)
    device.give_back_heap()
    assert len(trimmed) == trims


def test_no_more_memory_is_mapped_than_is_allowed_for_a_while():
    with device.memory_at_most(1 << 30):
        mmap.mmap(-1, 1 << 29).close()
        with pytest.raises(OSError, match="Cannot allocate memory"):
            mmap.mmap(-1, 1 << 31)
    mmap.mmap(-1, 1 << 31).close()


def test_a_block_leaves_nothing_behind(monkeypatch):
    """Nor is there anything of it while the next one's operands are made, not even what torch would keep of a
    GPU, for which the others there wait."""
    subject = opened(sets=2)
    subject.prepare("it", "torch.naive", "eager")
    subject.sample("it", 0.0)
    gone = weakref.ref(subject.sets[0].kv), weakref.ref(subject.prepared["it"].outs[0].tensor)
    left, emptied = [], []
    monkeypatch.setattr(device, "give_back_heap", lambda: left.extend(each() for each in gone))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(left)))
    gc.disable()
    subject.kind = "cuda"
    try:
        subject.fresh("serving", 2)
        assert left == [None, None]
    finally:
        gc.enable()
    subject.close()
    assert emptied == [2, 2]


@pytest.mark.parametrize(("events", "calls"), [(5000, 1 + 10), (1, 1 + 1)])
def test_a_call_of_many_events_is_profiled_once(monkeypatch, events, calls):
    monkeypatch.setattr(profile, "EVENTS", events)
    made = []
    call = [lambda: made.append(torch.ones(3) + 1)]
    assert profile.profile(call, "cpu", lambda: None, 1e-4)["kernels"]
    assert len(made) == calls


SIZES = [
    ("mla_decode", {"batch": 2, "ctx": 1, "heads": 16, "page": 1}, "torch.naive", ["q"]),
    ("mla_decode", {"batch": 2, "ctx": "1..3", "heads": 16, "page": 1}, "torch.naive", []),
    ("mha_prefill", {"batch": 2, "new": 1, "heads": 2}, "torch.naive", ["q", "k"]),
    ("mha_prefill", {"batch": 2, "new": 1, "prefix": 1, "heads": 2}, "torch.naive", []),
    ("block_scale_gemm", {"m": 1, "n": 128, "k": 128}, "torch.bf16", []),
    ("fused_moe", MOE | {"tokens": 1, "experts": 16, "topk": 4}, "torch.bf16", []),
    ("fused_moe", MOE | {"tokens": 1, "experts": 32, "topk": 2, "ep": 8}, "torch.bf16", []),
    ("fused_moe", MOE | {"tokens": 2, "experts": 16, "topk": 1, "ep": 16}, "torch.bf16", ["logits"]),
]
"""With one key in each sequence a right output is the values, whatever the queries are. And a token may come
from another rank, where other scores choose none of the experts here."""


@pytest.mark.parametrize(("op", "sizes", "impl", "without"), SIZES, ids=lambda value: str(value))
def test_a_right_kernel_answers_to_all_that_has_an_effect_and_nothing_else_has(op, sizes, impl, without):
    idle = []
    for boundary in kernels.OPS[op].boundaries:
        subject = opened(op=op, sizes=sizes, boundary=boundary)
        assert sorted(subject.sets[0].without_effect) == sorted(without)
        subject.prepare("it", impl, "eager", plugin=True)
        prepared = subject.prepared["it"].on_set[0]
        live = subject.sets[0].live_tensors()
        others = subject._make(SEEDS | {"live": 1}).live_tensors()
        for name in [name for name in live if not bench.same_bits(live[name], bench.bits(others[name]))]:
            kept = live[name].clone()
            prepared.call()
            before = bench.bits(prepared.result()).clone()
            live[name].copy_(others[name])
            prepared.call()
            if bench.same_bits(prepared.result(), before):
                idle.append(name)
            live[name].copy_(kept)
        seen = subject.compared("it", 0.0)
        assert (seen["stale"], seen["differed"]) == (False, 0)
        digest = subject.load(asdict(Seeds(0, 1)))
        assert subject.unread("it") == []
        assert subject.digest() == digest
    assert sorted(idle) == sorted(without)


def of_positive_scales(prepared: Prepared, compute: Call, number: int) -> None:
    """Computes nothing for others, as one of Blackwell that takes scales as exponents may."""
    if bool((prepared.operands.a_scale > 0).all()):
        compute()


def test_operands_are_changed_to_valid_ones():
    guest = Row(of_positive_scales, op="block_scale_gemm", impl="torch.bf16")
    subject = opened(guest, op="block_scale_gemm", sizes=GEMM | {"scales": "ue8m0"})
    subject.prepare("it", guest.name, "eager", plugin=True)
    assert subject.unread("it") == []


def test_an_output_of_zeros_need_not_change():
    """As of a token none of whose experts is on this rank."""
    subject = opened(op="block_scale_gemm", sizes=GEMM)
    subject.sets[0].b_scale.zero_()
    subject.prepare("it", "torch.bf16", "eager", plugin=True)
    assert not subject.output("it")["output"].strip(b"\x00\x80")
    assert subject.unread("it") == []
    assert not subject.compared("it", 0.0)["stale"]


def by_version(prepared: Prepared, compute: Call, number: int) -> None:
    """Computes anew where somebody wrote to the queries, by their version; else gives its last answer."""
    version = prepared.operands.q._version
    if number == 1 or version != prepared.version:
        compute()
        prepared.version, prepared.answer = version, prepared.out.clone()
    prepared.out.copy_(prepared.answer)


@pytest.mark.parametrize("kept", [True, False])
def test_calls_answer_to_another_activation(kept, monkeypatch):
    """Which is written behind its version, as an engine's kernels write it."""
    monkeypatch.setattr(bench, "LEAST_S", math.inf)
    subject = opened(Row(by_version) if kept else Row(), sets=2)
    digests = [each.digest() for each in subject.sets]
    subject.sample("it", 0.0)
    seen = subject.compared("it", 0.0)
    assert (seen["stale"], seen["differed"]) == (kept, 0)
    assert subject.repeats["it"].changed == bench.LEAST_CALLS
    assert [each.digest() for each in subject.sets] == digests


def test_an_op_may_have_no_activation_that_its_output_depends_on(monkeypatch):
    """Such as the sum of its columns: there is no old answer to keep. Nor offsets that are far."""
    monkeypatch.setattr(MlaDecodeOperands, "without_effect", frozenset({"q", "kv"}))
    subject = opened(Row(by_version), sets=2)
    assert not subject.compared("it", 0.0)["stale"]
    assert subject.repeats["it"].changed == 0
    assert subject.unread("it") == []
    guest = Row(op="block_scale_gemm", impl="torch.bf16")
    assert opened(guest, op="block_scale_gemm", sizes=GEMM).far("it") is None


def test_a_call_that_fails_on_another_activation_leaves_the_operands_as_they_were():
    """The other entries of its worker read them."""
    original = None

    def raises(prepared: Prepared, compute: Call, number: int) -> None:
        if original is not None and not torch.equal(prepared.operands.q, original):
            raise RuntimeError("no such luck")
        compute()

    subject = opened(Row(raises), sets=2)
    original = subject.sets[0].q.clone()
    digests = [each.digest() for each in subject.sets]
    with pytest.raises(RuntimeError, match="no such luck"):
        subject.compared("it", 0.0)
    assert [each.digest() for each in subject.sets] == digests


def test_two_calls_in_a_row_are_compared_however_many_samples_gave():
    """Samples may end with a call that computes, each time."""
    every_second = Row(lambda prepared, compute, number: number % 2 and compute())
    subject = opened(every_second, Row(name="another"))
    subject.prepare("it", Row.name, "eager", call=False)
    for _ in range(3):
        subject.sample("it", 0.0)
    repeats = subject.repeats["it"]
    assert (repeats.calls, repeats.differed) == (1, 0), "of two, as the third was not looked at yet"
    subject.repeats["it"] = replace(repeats, calls=bench.COMPARED_CALLS, changed=bench.CHANGED_CALLS)
    assert subject.compared("it", 30.0)["differed"] >= 1


def stale(every: int) -> Callable[[Prepared, Call, int], None]:
    """Gives, in one call of `every`, row 0 as the call before it left that: somebody did not wait for it."""

    def call(prepared: Prepared, compute: Call, number: int) -> None:
        compute()
        now = prepared.out[0].clone()
        if number > 1 and number % every == 0:
            prepared.out[0] = prepared.row
        prepared.row = now

    return call


STALES = [SIZES[3][:3], ("block_scale_gemm", GEMM, "torch.bf16")]


@pytest.mark.parametrize(("op", "sizes", "impl"), STALES, ids=str)
@pytest.mark.parametrize("every", [None, 1, 7])
def test_a_row_of_the_call_before_shows_where_operands_change(op, sizes, impl, every):
    """It is right as long as they do not."""
    guest = Row(op=op, impl=impl) if every is None else Row(stale(every), op, impl)
    subject = opened(guest, op=op, sizes=sizes)
    digest = subject.digest()
    seen = subject.compared("it", 60.0)
    assert (seen["calls"], subject.repeats["it"].changed) == (bench.COMPARED_CALLS, bench.CHANGED_CALLS)
    differed = {None: 0, 1: bench.CHANGED_CALLS, 7: 7}[every]
    assert (seen["differed"], len(seen["outputs"])) == (differed, 2 if differed else 1)
    assert subject.digest() == digest


def test_few_calls_are_compared_however_little_time_there_is(monkeypatch):
    """But not for ever: calls of a second are made for so many."""
    subject = opened(Row(), sets=2)
    monkeypatch.setattr(bench, "LEAST_S", math.inf)
    assert subject.compared("it", 0.0)["calls"] >= subject.repeats["it"].changed == bench.LEAST_CALLS
    subject.repeats.clear()
    monkeypatch.setattr(bench, "LEAST_S", 0.0)
    assert (subject.compared("it", 0.0)["calls"], subject.repeats["it"].changed) == (2, 1)


def test_of_sets_that_are_copies_the_first_stands_for_all():
    row, halved = Row(), Row(lambda prepared, compute, number: [compute(), prepared.out.mul_(0.5)])
    row.prepare_turn = lambda first, operands, out: halved.prepare(operands, out)
    seen = opened(row, sets=2).compared("it", 0.0)
    assert [output["set"] for output in seen["outputs"]] == [0, 0]


def test_after_a_profile_all_outputs_are_filled():
    subject = opened(Row(), sets=2)
    subject.sample("it", 0.0)
    subject.compare_last("it")
    subject.profile("it")
    subject.compare_last("it")
    assert all(bool((out.tensor == bench.SPOILT).all()) for out in subject.prepared["it"].outs)


@pytest.mark.parametrize("graph", [False, True])
def test_the_first_and_the_last_set_are_judged_where_sets_differ(graph):
    guest = Row(op="fused_moe", impl="torch.bf16")
    subject = opened(guest, op="fused_moe", sizes=MOE | {"tokens": 3, "experts": 16, "topk": 4}, sets=3)
    calls = [each.call for each in subject.prepared["it"].on_set]
    if graph:
        subject.prepared["it"].program = Program([lambda: [call() for call in calls]], calls_per_step=3)
    assert [output["set"] for output in subject.compared("it", 0.0)["outputs"]] == [0, 2]
    assert set(subject.repeats["it"].first) == {0, 1, 2}


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_places_of_more_than_32_bits_are_reached_without_touching_what_is_between(kv, monkeypatch):
    """By one that is right, one that counts values in 32 bits, and one that copies the whole cache."""

    def narrow(operands: MlaDecodeOperands) -> MlaDecodeOperands:
        pages = (1 << 32) // operands.kv[0].numel()
        return operands.replaced(page_table=operands.page_table % pages)

    rows = [
        Row(name="right"),
        Row(name="narrow", given=narrow),
        Row(name="copies", given=lambda operands: operands.replaced(kv=operands.kv.clone())),
    ]
    subject = opened(*rows, sizes=SMALL | {"kv": kv})
    before = subject.sets[0].digest()
    for row in rows:
        subject.prepare(row.name, row.name, "eager")
    right = {key: subject.output("right")[key] for key in ("output", "shape", "dtype")}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert subject.far("right") == right
    assert subject.far("narrow")["output"] != right["output"]
    monkeypatch.setattr(bench, "available_memory", lambda: 1 << 30)
    assert subject.far("copies") is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 1 << 20  # KiB
    assert subject.sets[0].digest() == before
    subject.kind = "cuda"
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free, found in ((1.9, None), (2.1, right)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * bench.FAR_BYTES, 0))
        assert subject.far("right") == found


@pytest.mark.parametrize("writes", [False, True])
def test_a_tensor_that_a_call_returns_is_not_read(writes):
    """Which is told where the output that was given stays unwritten."""

    def returns(prepared: Prepared, compute: Call, number: int) -> torch.Tensor:
        if not writes:
            return torch.zeros(3)
        compute()
        return prepared.out

    assert opened(Row(returns)).output("it")["ignored"] is not writes
