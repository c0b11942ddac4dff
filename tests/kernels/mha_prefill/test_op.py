"""MHA prefill: sizes, work, operands, reference, and every implementation that this machine runs."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch

import kernels
from harness.paths import ROOT
from harness.workers.child.judge import judge
from kernels.mha_prefill.operands import GUARD, beyond
from kernels.mha_prefill.reference import sampled_rows
from kernels.mha_prefill.sizes import VALUE, WIDTH
from kernels.operands import Seeds
from kernels.platform import named
from kernels.vendor import Vendor
from shapes.case import parse

OP = kernels.OPS["mha_prefill"]
IMPLEMENTATIONS = {i.name: i for i in kernels.implementations("mha_prefill")}
RAGGED = "batch=4 new=1..40 prefix=0..30 heads=3"


def sizes_of(text: str):
    return OP.sizes(parse(text)[0])


def operands_of(text: str, seeds: Seeds = Seeds()):  # noqa: B008
    return OP.operands(sizes_of(text), seeds, "cpu")


# Sizes and work


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("batch=0 new=1", "size batch=0 of mha_prefill must be at least 1"),
        ("batch=1 new=1 heads=0", "size heads=0 of mha_prefill must be at least 1"),
        ("batch=1 new=0", "length '0' must be at least 1 and rise from low to high"),
        ("batch=1 new=1 prefix=9..3", "length '9..3' must be at least 0 and rise from low to high"),
        ("batch=1 new=1 dtype=fp16", "size dtype='fp16' of mha_prefill must be bf16 or fp8"),
        ("batch=1 new=1 dtype=fp8 fp8=e5m2", "unknown FP8 format 'e5m2'; formats: e4m3fn, e4m3fnuz"),
        ("batch=1", "mha_prefill needs new; sizes: batch, new, prefix, heads, dtype, fp8"),
    ],
)
def test_sizes_that_cannot_be(text, reason):
    with pytest.raises(ValueError) as error:
        sizes_of(text)
    assert str(error.value) == reason


def test_every_seed_has_the_same_sequences_in_another_order():
    sizes = sizes_of("batch=7 new=10..90 prefix=0..60")
    orders = [sizes.lengths(seed) for seed in range(7)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert all(a != b for a, b in itertools.pairwise(orders))


@pytest.mark.parametrize("text", [RAGGED, "batch=1 new=1 heads=1", "batch=2 new=5 prefix=3 heads=2"])
def test_work_is_what_loops_count(text):
    sizes, o = sizes_of(text), operands_of(text)
    pairs = sum(1 for s in o.sequences for i in range(s.new) for j in range(s.length) if j <= s.prefix + i)
    work = OP.work(sizes)
    assert work.flops == pairs * sizes.heads * 2 * (WIDTH + VALUE)
    out = OP.empty_output(sizes, "cpu")
    assert work.bytes == o.q.nbytes + o.k.nbytes + o.v.nbytes + out.nbytes
    assert OP.output_bytes(sizes) == out.nbytes
    assert OP.operand_bytes(sizes) == sum(beyond(t).nbytes for t in (o.q, o.k, o.v))


# Operands


def test_operands_are_a_function_of_sizes_and_seeds():
    digests = {operands_of(RAGGED, Seeds(*s)).digest() for s in ((3, 4), (3, 5), (4, 4))}
    assert len(digests) == 3


def test_new_live_operands_keep_the_lengths():
    first, other = operands_of(RAGGED, Seeds(1, 1)), operands_of(RAGGED, Seeds(1, 2))
    assert first.sequences == other.sequences and torch.equal(first.cu_k, other.cu_k)
    assert set(first.live_tensors()) == {"q", "k", "v"}
    assert not any(torch.equal(t, other.live_tensors()[n]) for n, t in first.live_tensors().items())


@pytest.mark.parametrize("copied", [False, True])
def test_guards_stand_around_finite_tokens(copied):
    o = operands_of(RAGGED)
    o = o.copy() if copied else o
    for tensor in (o.q, o.k, o.v):
        assert tensor.isfinite().all()
        around = beyond(tensor)
        assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all()
    assert o.cu_q[-1] == len(o.q) and o.cu_k[-1] == len(o.k)


def test_no_two_tokens_are_alike_behind_those_drawn():
    o = operands_of("batch=1 new=9000 heads=1")
    for tensor in (o.q, o.k, o.v):
        assert len(torch.unique(tensor.flatten(1), dim=0)) == 9000


# The reference


def test_the_reference_is_what_plain_loops_give():
    o = operands_of("batch=3 new=1..5 prefix=0..4 heads=2")
    reference = OP.reference(o)
    q, k, v = (t.double().tolist() for t in (o.q, o.k, o.v))
    for s, h in itertools.product(o.sequences, range(2)):
        for i in range(s.new):
            row, seen = q[s.queries.start + i][h], range(s.keys.start, s.keys.start + s.prefix + i + 1)
            dots = [math.fsum(a * b for a, b in zip(row, k[j][h], strict=True)) for j in seen]
            weights = [math.exp((dot - max(dots)) / math.sqrt(192)) for dot in dots]
            for d in range(0, VALUE, 7):
                want = math.fsum(w * v[j][h][d] for w, j in zip(weights, seen, strict=True)) / sum(weights)
                got = reference.value[s.queries.start + i, h, d].item()
                assert abs(got - want) <= 0.02 * reference.sigma[s.queries.start + i, h, d].item()


SAMPLED = "batch=5 new=70..200 prefix=0..90 heads=2"


def test_a_sample_agrees_with_the_whole_and_has_the_ends():
    o = operands_of(SAMPLED)
    whole, sample = OP.reference(o), OP.reference(o, 2e8)
    assert whole.rows is None and 20 < len(sample.rows) < len(o.q)
    ends = {row for s in o.sequences for row in (s.queries.start, s.queries.stop - 1)}
    edges = {s.queries.start + row for s in o.sequences for row in (63, 64)}
    assert ends | edges <= set(sample.rows)
    error = (sample.value - whole.value[sample.rows]) / whole.sigma[sample.rows]
    assert error.abs().max() < 0.02
    assert torch.allclose(sample.sigma, whole.sigma[sample.rows], rtol=1e-3)


def test_a_sample_grows_by_the_flops_it_may_take():
    sequences = operands_of(SAMPLED).sequences
    counts = [len(sampled_rows(sequences, 2, flops) or range(675)) for flops in (1, 1e7, 1e8, 3e8, 1e12)]
    assert counts == sorted(set(counts)) and counts[0] == 1


# Implementations


def run(prepared, sizes):
    prepared.out.fill_(math.nan)
    prepared.call()
    return prepared.result()


@pytest.mark.parametrize("name", ["torch.naive", "torch.sdpa"])
def test_live_and_stationary_operands_change(name):
    sizes = sizes_of(RAGGED)
    for stationary in (0, 1):
        o = operands_of(RAGGED, Seeds(stationary, 0))
        prepared = IMPLEMENTATIONS[name].prepare(o, OP.empty_output(sizes, "cpu"))
        for live in (0, 1):
            fresh = operands_of(RAGGED, Seeds(stationary, live))
            prepared.load(fresh.live_tensors())
            report = judge(run(prepared, sizes), OP.reference(fresh), OP.tolerance(sizes))
            assert report["ok"], report["reason"]


VLLM = """
import math, torch, kernels
from kernels.operands import Seeds
from harness.workers.child.judge import judge
op = kernels.OPS["mha_prefill"]
implementation = next(i for i in kernels.implementations("mha_prefill") if i.name == "vllm.extend")
for prefix in ("0", "0..30"):
    sizes = op.sizes({"batch": 4, "new": "1..40", "prefix": prefix, "heads": 3})
    o = op.operands(sizes, Seeds(), "cpu")
    prepared = implementation.prepare(o, op.empty_output(sizes, "cpu").fill_(math.nan))
    for live in (0, 1):
        fresh = op.operands(sizes, Seeds(0, live), "cpu")
        prepared.load(fresh.live_tensors())
        prepared.call()
        report = judge(prepared.result(), op.reference(fresh), op.tolerance(sizes))
        assert report["ok"], report["reason"]
"""


def test_vllm_takes_new_live_operands():
    from kernels.platform import detect

    if not (support := IMPLEMENTATIONS["vllm.extend"].available(detect("cpu"))).ok:
        pytest.skip(support.reason)
    done = subprocess.run([sys.executable, "-c", VLLM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90", "sm_100", "sm_103", "sm_120"])
def test_a_gpu_has_rows_of_libraries(arch, dtype):
    """At least two, but for FP8: AITER's on gfx942 and cuDNN's on sm_120 stand alone there."""
    here = named("rocm" if arch.startswith("gfx") else "cuda", arch)
    case = OP.case({**OP.defaults(arch), "batch": 2, "new": "64", "prefix": "0..9", "dtype": dtype})
    vendors = [
        i.name for i in IMPLEMENTATIONS.values() if isinstance(i, Vendor) and i.supports(case, here).ok
    ]
    assert len(vendors) >= (1 if dtype == "fp8" and arch in ("gfx942", "sm_120") else 2), vendors


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("torch.sdpa_cudnn", {"prefix": "1..9"}, "needs prefix=0"),
        ("vllm.dense", {"prefix": "1..9"}, "takes no cached prefix"),
        ("flash_attn.fa2", {"dtype": "fp8"}, "takes dtype=bf16"),
        ("flash_attn.fa4@vllm", {"dtype": "fp8"}, "takes dtype=bf16 on sm_90"),
    ],
)
def test_what_a_row_does_not_take(name, given, reason):
    here = named("cpu" if name == "vllm.dense" else "cuda")
    case = OP.case({**OP.defaults(here.arch), "batch": 1, "new": "64", **given})
    assert reason in IMPLEMENTATIONS[name].supports(case, here).reason


def test_the_compiled_mask_says_what_every_row_sees():
    from kernels.mha_prefill.providers.torch_flex import BLOCK, block_mask

    o = operands_of("batch=4 new=1..300 prefix=0..200 heads=1")
    mask = block_mask(o)
    seen = torch.zeros(len(o.q), len(o.k), dtype=torch.bool)
    for s in o.sequences:
        seen[s.queries, s.keys] = torch.ones(s.new, s.length, dtype=torch.bool).tril(s.prefix)
    row, key = torch.arange(len(o.q))[:, None], torch.arange(len(o.k))[None, :]
    assert torch.equal(mask.mask_mod(0, 0, row, key), seen)
    for r, rows in enumerate(seen.split(BLOCK)):
        some = [b for b, part in enumerate(rows.split(BLOCK, 1)) if part.any() and not part.all()]
        full = mask.full_kv_indices[0, 0, r, : mask.full_kv_num_blocks[0, 0, r]].tolist()
        partial = mask.kv_indices[0, 0, r, : mask.kv_num_blocks[0, 0, r]].tolist()
        assert set(some) <= set(partial)
        assert all(rows[:, b * BLOCK : (b + 1) * BLOCK].all() for b in full)
        assert {b for b, part in enumerate(rows.split(BLOCK, 1)) if part.any()} == set(full) | set(partial)
