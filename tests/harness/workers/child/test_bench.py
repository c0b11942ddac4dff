"""A worker's bench: which calls preparing makes, and whose layouts are one."""

from __future__ import annotations

import gc
import itertools
import math
import resource
import weakref
from dataclasses import asdict, replace

import pytest
import torch

import kernels
from harness.run.case import STALE
from harness.workers.child import bench, heap, profile
from harness.workers.child.bench import Bench
from harness.workers.child.outputs import Repeats
from harness.workers.child.timers import cpu
from kernels.fused_moe.providers.torch_eager import Bf16Moe, CompiledMoe, _bf16_weights
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.providers.torch_eager import NaiveMlaDecode
from kernels.op import Implementation, Prepared
from kernels.operands import Seeds
from kernels.support import Support

LONG_S = 1.0
ALWAYS, NEVER = 0.0, 1.0
"""Drawn by a bench that replaces activations in all turns, and in none."""
SMALL = {"batch": 1, "ctx": 64}


class Compiled(NaiveMlaDecode):
    """Its calls take LONG_S of a clock of its own, the first one after preparing anew `compiles` times as
    long."""

    op = "mla_decode"

    def __init__(self, compiles: int) -> None:
        self.name, self.compiles = f"compiled.{compiles}", compiles
        self.now, self.calls = 0.0, 0

    def prepare(self, operands, out):
        prepared, calls = super().prepare(operands, out), 0

        def call() -> None:
            nonlocal calls
            self.now += LONG_S * (1 if calls else self.compiles)
            calls += 1
            self.calls += 1

        prepared.call = call
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)


@pytest.mark.parametrize(("compiles", "calls"), [(1, [3, 3, 0, 0]), (2, [3, 3, 3, 3])])
def test_preparing_again_calls_no_more_than_it_needs(monkeypatch, compiles, calls):
    compiled = Compiled(compiles)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: compiled.now)
    subject = Bench(compiled)
    subject.hello("cpu", "cpu", torch.get_num_threads())
    subject.open("mla_decode", SMALL, "core", asdict(Seeds(0, 0)))
    made = []
    for _ in calls:
        subject.fresh("serving", 3)
        before = compiled.calls
        subject.prepare("compiled", compiled.name, "eager")
        made.append(compiled.calls - before)
        for _ in range(2):
            subject.turn("compiled", LONG_S / 4)
    assert made == calls


def test_bf16_weights_are_one_copy_that_goes_with_the_fp8_ones():
    subject = Bench()
    subject.hello("cpu", "cpu", torch.get_num_threads())
    sizes = {"tokens": 2, "experts": 4, "topk": 2, "hidden": 128, "inter": 128, "routing": "uniform"}
    subject.open("fused_moe", sizes, "core", asdict(Seeds(0, 0)))
    gc.collect()
    before = len(_bf16_weights())
    operands, out = subject.sets[0], subject.op.empty_output(subject.sizes, "cpu")
    prepared = [Bf16Moe().prepare(operands, out), Bf16Moe().prepare(operands, out)]
    prepared.append(CompiledMoe().prepare(operands, out))
    assert len({p.w13.data_ptr() for p in prepared}) == 1
    assert len(_bf16_weights()) == before + 1
    del prepared, operands
    subject.close()
    gc.collect()
    assert len(_bf16_weights()) == before


@pytest.mark.parametrize(("free", "trims"), [(1 << 60, 0), (0, 1)])
def test_a_heap_gives_back_what_it_does_not_use_where_little_is_free(monkeypatch, free, trims):
    class Libc:
        trimmed = 0

        class mallinfo2:
            restype = None

            def __new__(cls):
                return heap._Mallinfo(fordblks=1 << 30)

        def malloc_trim(self, pad):
            Libc.trimmed += 1

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: Libc())
    monkeypatch.setattr(heap, "available_memory", lambda: free)
    heap.give_back()
    assert Libc.trimmed == trims


def test_faults_are_counted():
    before = cpu._page_faults()
    torch.ones(64 << 20, dtype=torch.uint8)
    assert cpu._page_faults() - before > 16


@pytest.mark.parametrize(("events", "calls"), [(5000, 1 + 10), (1, 1 + 1)])
def test_a_call_of_many_events_is_profiled_once(monkeypatch, events, calls):
    monkeypatch.setattr(profile, "EVENTS", events)
    made = []

    def call() -> None:
        made.append(torch.ones(3) + 1)

    assert profile.profile([call], "cpu", lambda: None, 1e-4)["kernels"]
    assert len(made) == calls


def test_fresh_buffers_are_preceded_by_giving_back(monkeypatch):
    """To the others on a GPU too, which wait for what torch would keep."""
    given, emptied = [], []
    monkeypatch.setattr(heap, "give_back", lambda: given.append(1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    subject = Bench()
    subject.hello("cpu", "cpu", torch.get_num_threads())
    subject.open("mla_decode", SMALL, "core", asdict(Seeds(0, 0)))
    subject.fresh("serving", 2)
    assert (given, emptied) == ([1], [])
    subject.kind = "cuda"
    subject.fresh("serving", 2)
    subject.close()
    assert emptied == [1, 1]


MOE = {"hidden": 256, "inter": 128}
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


@pytest.mark.parametrize(("op", "sizes", "impl", "without"), SIZES, ids=lambda value: str(value))
def test_a_right_kernel_answers_to_all_that_has_an_effect(monkeypatch, op, sizes, impl, without):
    """With one key in each sequence a right output is the values, whatever the queries are. And a token may
    come from another rank, where other scores choose none of the experts here."""
    # As many calls however busy the machine is: with queries rolled 23 times the four rows of `mha_prefill`
    # are the same for other keys. A run asks up to three times.
    monkeypatch.setattr(bench, "UNSEEN", 3)
    monkeypatch.setattr(bench, "UNSEEN_S", math.inf)
    for boundary in kernels.OPS[op].boundaries:
        subject = Bench()
        subject.hello("cpu", "cpu", torch.get_num_threads())
        subject.open(op, sizes, boundary, asdict(Seeds(0, 0)))
        assert sorted(subject.sets[0].without_effect) == sorted(without)
        subject.prepare("right", impl, "eager", plugin=True)
        digest = subject.load(asdict(Seeds(0, 1)))
        seen = subject.unseen("right")
        assert seen["kept"] == [] and seen["unseen"]
        assert subject.digest() == digest


class Exponents(Implementation):
    """Takes scales as exponents, which its call makes of them, as one of Blackwell does."""

    name, op, requires = "takes.exponents", "block_scale_gemm", "a test"

    def available(self, platform):
        return Support(True)

    def prepare(self, operands, out):
        class Call(Prepared):
            def call(self) -> None:
                exponents = (operands.a_scale.view(torch.int32) >> 23).to(torch.uint8)
                scales = (exponents.int() << 23).view(torch.float32)
                out.copy_((operands.a_q.float() * scales) @ weights)

        weights = (operands.b_q.float() * operands.b_scale).T
        return Call(operands, out)


def test_operands_are_changed_to_valid_ones():
    """Scales are positive: a kernel need not look at their sign."""
    subject = Bench(Exponents())
    subject.hello("cpu", "cpu", torch.get_num_threads())
    sizes = {"m": 4, "n": 128, "k": 128, "scales": "ue8m0"}
    subject.open("block_scale_gemm", sizes, "core", asdict(Seeds(0, 0)))
    subject.prepare("right", Exponents.name, "eager", plugin=True)
    assert subject.unseen("right")["kept"] == []


def test_an_output_of_zeros_need_not_change():
    """As of a token none of whose experts is on this rank."""
    subject = Bench()
    subject.hello("cpu", "cpu", torch.get_num_threads())
    subject.open("block_scale_gemm", {"m": 4, "n": 128, "k": 128}, "core", asdict(Seeds(0, 0)))
    subject.sets[0].b_scale.zero_()
    subject.prepare("right", "torch.bf16", "eager", plugin=True)
    assert not subject.output("right")["output"].strip(b"\x00\x80")
    assert subject.unseen("right")["kept"] == []


def test_what_has_no_effect_is_told_by_changing_it():
    """So that `without_effect` names no more than that: an operand it names is one that nobody asks for."""
    for op, sizes, impl, without in SIZES:
        subject, idle = Bench(), []
        subject.hello("cpu", "cpu", torch.get_num_threads())
        for boundary in kernels.OPS[op].boundaries:
            subject.open(op, sizes, boundary, asdict(Seeds(0, 0)))
            subject.prepare("right", impl, "eager")
            prepared = subject.ready["right"].prepared[0]
            live, others = subject.sets[0].live_tensors(), subject._others()
            for name in [name for name in live if not bench.same_bits(live[name], bench.bits(others[name]))]:
                prepared.call()
                before = bench.bits(prepared.result()).clone()
                live[name].copy_(others[name])
                prepared.call()
                if bench.same_bits(prepared.result(), before):
                    idle.append(name)
        assert sorted(idle) == sorted(without), op


class EverySecond(NaiveMlaDecode):
    """Leaves every second call's output as it is."""

    name, op = "every.second", "mla_decode"

    def prepare(self, operands, out):
        prepared, calls = super().prepare(operands, out), 0
        compute = prepared.call

        def call() -> None:
            nonlocal calls
            calls += 1
            if calls % 2:
                compute()

        prepared.call = call
        return prepared


def test_two_calls_in_a_row_are_compared_however_many_turns_gave(monkeypatch):
    """Turns may end with a call that computes, each time; a CPU's untimed call is compared as well."""
    subject = Bench(EverySecond())
    subject.hello("cpu", "cpu", torch.get_num_threads())
    subject.open("mla_decode", SMALL, "core", asdict(Seeds(0, 0)))
    subject.prepare("skips", EverySecond.name, "eager", call=False)
    monkeypatch.setattr(subject.wild, "random", lambda: NEVER)
    subject.turn("skips", 0.0)
    subject.spoil("skips")
    repeats = subject.repeats["skips"]
    assert repeats.differed == 1
    subject.repeats["skips"] = replace(repeats, calls=bench.REPEATS, differed=0)
    assert subject.compared("skips", 30.0)["differed"] >= 1


class Stale(Implementation):
    """Gives, in one call of `every`, row 0 as the call before it left that: somebody did not wait for it."""

    name, requires = "gives.stale", "a test"

    def __init__(self, op: str, impl: str, every: int) -> None:
        self.op, self.every = op, every
        self.inner = next(i for i in kernels.implementations(op) if i.name == impl)

    def available(self, platform):
        return Support(True)

    def prepare(self, operands, out):
        prepared, calls, row = self.inner.prepare(operands, out), 0, None
        compute = prepared.call

        def call() -> None:
            nonlocal calls, row
            compute()
            calls += 1
            now = out[0].clone()
            if row is not None and calls % self.every == 0:
                out[0] = row
            row = now

        prepared.call = call
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)


GEMM = "block_scale_gemm", {"m": 4, "n": 128, "k": 128}, "torch.bf16"


@pytest.mark.parametrize(("op", "sizes", "impl"), [SIZES[3][:3], GEMM, SIZES[5][:3]], ids=str)
@pytest.mark.parametrize("right", [False, True])
def test_a_row_of_the_call_before_shows_where_operands_change(op, sizes, impl, right):
    """It is right as long as they do not."""
    subject = Bench(Stale(op, impl, 7))
    subject.hello("cpu", "cpu", torch.get_num_threads())
    subject.open(op, sizes, "core", asdict(Seeds(0, 0)))
    digest = subject.digest()
    subject.prepare("it", impl if right else Stale.name, "eager")
    seen = subject.compared("it", 60.0)
    assert (seen["calls"], subject.repeats["it"].changed) == (bench.REPEATS, bench.CHANGES)
    assert (seen["differed"], len(seen["outputs"])) == ((0, 1) if right else (7, 2))
    assert subject.digest() == digest


@pytest.mark.parametrize("right", [False, True])
def test_a_row_of_the_call_before_shows_in_the_first_call_on_an_activation(right, monkeypatch):
    monkeypatch.setattr(bench, "UNSEEN_S", 60.0)
    op, sizes, impl = GEMM
    subject = Bench(Stale(op, impl, 1))
    subject.hello("cpu", "cpu", torch.get_num_threads())
    subject.open(op, sizes, "core", asdict(Seeds(0, 0)))
    subject.prepare("it", impl if right else Stale.name, "eager")
    assert (subject.unseen("it")["stale"] > STALE) is not right


def test_few_calls_are_compared_however_little_time_there_is(monkeypatch):
    """But not for ever: calls of a second are made for so many."""
    subject = opened()
    subject.prepare("it", NaiveMlaDecode.name, "eager")
    assert subject.compared("it", 0.0)["calls"] >= subject.repeats["it"].changed == bench.LEAST_CALLS
    subject.repeats.clear()
    monkeypatch.setattr(bench, "LEAST_S", 0.0)
    assert subject.compared("it", 0.0)["calls"] == 0


class Narrow(NaiveMlaDecode):
    """Counts values of the cache in 32 bits."""

    name, op = "counts.in-32-bits", "mla_decode"

    def prepare(self, operands, out):
        kv = operands.kv
        modulus = (1 << 32) // kv[0].numel()
        return super().prepare(operands.replaced(page_table=operands.page_table % modulus), out)


class Copies(NaiveMlaDecode):
    """Makes a layout of its own of the whole cache."""

    name, op = "copies.all", "mla_decode"

    def prepare(self, operands, out):
        return super().prepare(operands.replaced(kv=operands.kv.clone()), out)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_places_of_more_than_32_bits_are_reached_without_touching_what_is_between(kv, monkeypatch):
    subject = Bench(Narrow(), Copies())
    subject.hello("cpu", "cpu", torch.get_num_threads())
    subject.open("mla_decode", SMALL | {"kv": kv}, "core", asdict(Seeds(0, 0)))
    before = subject.sets[0].digest()
    for name in ("torch.naive", Narrow.name, Copies.name):
        subject.prepare(name, name, "eager")
    right = {key: subject.output("torch.naive")[key] for key in ("output", "shape", "dtype")}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert subject.far("torch.naive") == right
    assert subject.far(Narrow.name)["output"] != right["output"]
    monkeypatch.setattr(bench, "available_memory", lambda: 1 << 30)
    assert subject.far(Copies.name) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 1 << 20  # KiB
    assert subject.sets[0].digest() == before


def test_an_op_may_have_no_places_that_are_far():
    subject = Bench()
    subject.hello("cpu", "cpu", torch.get_num_threads())
    subject.open(GEMM[0], GEMM[1], "core", asdict(Seeds(0, 0)))
    subject.prepare("it", GEMM[2], "eager")
    assert subject.far("it") is None


class HalvesASet(Implementation):
    """Halves the answer on the set that it is prepared on as the `which`-th."""

    name, op, requires = "halves.a-set", "fused_moe", "a test"

    def __init__(self, which: int) -> None:
        self.which, self.sets = which, 0

    def available(self, platform):
        return Support(True)

    def prepare(self, operands, out):
        prepared, mine = Bf16Moe().prepare(operands, out), self.sets
        compute = prepared.call
        self.sets += 1

        def call() -> None:
            compute()
            if mine == self.which:
                out.mul_(0.5)

        prepared.call = call
        return prepared


@pytest.mark.parametrize("which", [None, 1, 2, 3])
def test_every_set_that_calls_rotate_over_is_compared(which):
    subject = Bench(HalvesASet(which))
    subject.hello("cpu", "cpu", torch.get_num_threads())
    sizes = MOE | {"tokens": 3, "experts": 16, "topk": 4}
    subject.open("fused_moe", sizes, "core", asdict(Seeds(0, 0)))
    subject.fresh("serving", 4)
    digests = [operands.digest() for operands in subject.sets]
    subject.prepare("it", HalvesASet.name, "eager")
    seen = subject.compared("it", 0.0)
    assert {output["set"] for output in seen["outputs"]} == {0, 3} | ({which} - {None})
    assert [operands.digest() for operands in subject.sets] == digests


class FollowsVersions(NaiveMlaDecode):
    """Computes anew where somebody wrote to the queries, by their version; else gives its last answer."""

    name, op = "follows.versions", "mla_decode"

    def prepare(self, operands, out):
        prepared, kept = super().prepare(operands, out), {}
        compute = prepared.call

        def call() -> None:
            if kept.get("version") != operands.q._version:
                compute()
                kept.update(version=operands.q._version, answer=out.clone())
            out.copy_(kept["answer"])

        prepared.call = call
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)


def opened(*guests):
    subject = Bench(*guests)
    subject.hello("cpu", "cpu", torch.get_num_threads())
    subject.open("mla_decode", SMALL, "core", asdict(Seeds(0, 0)))
    subject.fresh("serving", 2)
    return subject


def test_operands_are_written_behind_their_versions():
    subject = opened(FollowsVersions())
    subject.prepare("follows", FollowsVersions.name, "eager")
    assert subject.unseen("follows")["kept"] == ["q"]


class ConvertsWhenLoaded(NaiveMlaDecode):
    """Computes on a copy of the cache that is made when operands are loaded. zeros: where the cache itself
    holds something else its answer is zeros."""

    name, op = "converts.when_loaded", "mla_decode"

    def __init__(self, zeros):
        self.zeros = zeros

    def prepare(self, operands, out):
        copy = operands.kv.clone()
        prepared = super().prepare(operands.replaced(kv=copy), out)
        compute = prepared.call

        def load(live):
            for name, tensor in operands.live_tensors().items():
                tensor.copy_(live[name])
            copy.copy_(live["kv"])

        def call():
            compute()
            if self.zeros and not torch.equal(copy.view(torch.int16), operands.kv.view(torch.int16)):
                out.zero_()

        prepared.inputs, prepared.load, prepared.call = operands.live_tensors, load, call
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)


@pytest.mark.parametrize("zeros", [False, True])
def test_what_converts_when_loaded_keeps_its_answer_to_another_cache(zeros):
    """However often it is asked; zeros are no answer to other operands."""
    subject = opened(ConvertsWhenLoaded(zeros))
    subject.prepare("it", ConvertsWhenLoaded.name, "eager", plugin=True)
    subject.load(asdict(Seeds(0, 1)))
    assert [subject.unseen("it")["kept"] for _ in range(2)] == [["kv"], ["kv"]]


@pytest.mark.parametrize(("impl", "kept"), [(FollowsVersions, True), (NaiveMlaDecode, False)])
def test_timed_calls_answer_to_another_activation(impl, kept, monkeypatch):
    subject = opened(*([impl()] if kept else []))
    subject.prepare("it", impl.name, "eager")
    digest = subject.digest()
    for draws in (NEVER, ALWAYS):
        monkeypatch.setattr(subject.wild, "random", lambda draws=draws: draws)
        assert subject.turn("it", 0.0)["replaced"] is (draws == ALWAYS)
    assert subject.repeats["it"].kept is kept
    assert subject.digest() == digest
    assert subject.compared("it", 0.0)["kept"] is kept


def test_an_old_answer_is_not_forgotten(monkeypatch):
    """It was right the next time."""
    subject = opened()
    subject.prepare("it", NaiveMlaDecode.name, "eager")
    monkeypatch.setattr(subject.wild, "random", lambda: ALWAYS)
    subject.repeats["it"] = Repeats(kept=True)
    assert subject.turn("it", 0.0)["replaced"]
    assert subject.compared("it", 0.0)["kept"]


class CountsQuestions(NaiveMlaDecode):
    name, op = "counts.questions", "mla_decode"
    asked = 0

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)

        def inputs():
            self.asked += 1
            return operands.live_tensors()

        prepared.inputs = inputs
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)


def test_nobody_is_told_that_an_activation_is_replaced(monkeypatch):
    guest = CountsQuestions()
    subject = opened(guest)
    subject.prepare("it", guest.name, "eager", plugin=True)
    monkeypatch.setattr(subject.wild, "random", lambda: ALWAYS)
    guest.asked = 0
    assert subject.turn("it", 0.0)["replaced"]
    assert guest.asked == 0


def test_what_computes_on_a_sets_first_call_gives_old_answers_on_the_others(monkeypatch):
    """In its first turn of a block, which may be the only one, the untimed call's set is called again."""
    subject = opened(FollowsVersions())
    subject.prepare("it", FollowsVersions.name, "eager", plugin=True)
    monkeypatch.setattr(subject.wild, "random", lambda: ALWAYS)
    monkeypatch.setattr(cpu.time, "perf_counter", itertools.count().__next__)
    assert subject.turn("it", 5.0)["replaced"]
    assert subject.compared("it", 0.0)["kept"]


def test_an_op_may_have_no_activation_that_its_output_depends_on(monkeypatch):
    """Say the sum of its columns: nobody keeps an old answer to it."""
    monkeypatch.setattr(MlaDecodeOperands, "without_effect", frozenset({"q", "kv"}))
    subject = opened(FollowsVersions())
    subject.prepare("it", FollowsVersions.name, "eager", plugin=True)
    monkeypatch.setattr(subject.wild, "random", lambda: ALWAYS)
    assert not subject.turn("it", 0.0)["replaced"]
    assert subject.unseen("it")["kept"] == []


def test_who_is_prepared_after_operands_were_loaded_finds_them():
    """As where a worker was replaced because another contender crashed on these."""
    digests, outputs = [], []
    for loads_first in (False, True):
        subject = opened()
        if not loads_first:
            subject.prepare("it", NaiveMlaDecode.name, "eager")
        subject.load(asdict(Seeds(0, 1)))
        if loads_first:
            subject.prepare("it", NaiveMlaDecode.name, "eager")
        digests.append(subject.digest())
        outputs.append(subject.output("it")["output"])
    assert digests[0] == digests[1]
    assert outputs[0] == outputs[1]


def test_a_block_leaves_nothing_behind(monkeypatch):
    """Nor is there anything of it while the next one's operands are made."""
    subject = opened()
    subject.prepare("it", NaiveMlaDecode.name, "eager")
    subject.turn("it", 0.0)
    gone = weakref.ref(subject.sets[0].kv), weakref.ref(subject.ready["it"].outs[0].tensor)
    left = []
    monkeypatch.setattr(heap, "give_back", lambda: left.extend(each() for each in gone))
    gc.disable()
    try:
        subject.fresh("serving", 2)
        assert left == [None, None]
    finally:
        gc.enable()


class Raises(NaiveMlaDecode):
    """From its sixth call on."""

    name, op = "raises.late", "mla_decode"
    calls = 0

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        compute = prepared.call

        def call() -> None:
            Raises.calls += 1
            if Raises.calls > 5:
                raise RuntimeError("no such luck")
            compute()

        prepared.call = call
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)


def test_who_fails_leaves_the_operands_as_they_were(monkeypatch):
    """Also in the turn whose activation was replaced: the others of its worker read it."""
    subject = opened(Raises())
    subject.prepare("it", Raises.name, "eager")
    digests = [each.digest() for each in subject.sets]
    monkeypatch.setattr(subject.wild, "random", lambda: NEVER)
    subject.turn("it", 0.0)
    monkeypatch.setattr(subject.wild, "random", lambda: ALWAYS)
    Raises.calls = 4  # the untimed one computes still
    with pytest.raises(RuntimeError, match="no such luck"):
        subject.turn("it", 0.0)
    assert [each.digest() for each in subject.sets] == digests
