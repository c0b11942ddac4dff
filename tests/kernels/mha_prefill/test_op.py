"""MHA prefill: cases, work, operands, the reference, and what the check tells apart."""

import itertools
import json
import math

import pytest
import torch

import kernels
from harness.paths import ROOT
from harness.workers.child.judge import compare_output
from kernels.attention import edges
from kernels.formats import fp8_format
from kernels.mha_prefill.operands import GUARD, VALUE, WIDTH, MhaPrefillOperands, Sequence, with_guards
from kernels.mha_prefill.problem import TILES, sampled_rows
from kernels.op import Reference
from kernels.operands import Seeds
from shapes.case import parse

OP = kernels.OPS["mha_prefill"]
RAGGED = "batch=4 new=1..40 prefix=0..30 heads=3"
FORMATS = ("e4m3fn", "e4m3fnuz")
each_dtype = pytest.mark.parametrize("dtype", ["bf16", "fp8"])


def sizes_of(text: str):
    return OP.sizes(parse(text)[0])


def made(text: str, seeds: Seeds = Seeds()) -> MhaPrefillOperands:  # noqa: B008
    return OP.operands(sizes_of(text), seeds, "cpu")


# Cases and work


def test_recorded_cases_keep_their_keys_and_fp8_cases_name_their_format():
    for path in sorted((ROOT / "results").glob("*/mha_prefill-*/cells.jsonl")):
        cells = [json.loads(line) for line in path.read_text().splitlines()]
        keys = {cell["case"] for cell in cells if cell.get("kind") == "cell"}
        assert keys, path
        for key, arch in itertools.product(keys, ("x86-avx512", "gfx942", "sm_90")):
            text = key.removeprefix("mha_prefill ").removesuffix(" core")
            assert OP.case({**OP.defaults(arch), **parse(text)[0]}).key == key
    for arch, fp8 in (("gfx942", "e4m3fnuz"), ("sm_90", "e4m3fn")):
        case = OP.case({**OP.defaults(arch), "batch": 1, "new": "1", "dtype": "fp8"})
        assert case.text.endswith(f"dtype=fp8 fp8={fp8}")


def test_every_seed_has_the_same_sequences_in_another_order():
    sizes = sizes_of("batch=7 new=10..90 prefix=0..60")
    orders = [sizes.lengths(seed) for seed in range(7)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert all(a != b for a, b in itertools.pairwise(orders))


@each_dtype
@pytest.mark.parametrize("text", [RAGGED, "batch=2 new=5 prefix=3 heads=2"])
def test_work_is_what_loops_count(text, dtype):
    o = made(f"{text} dtype={dtype}")
    pairs = sum(1 for s in o.sequences for i in range(s.new) for j in range(s.length) if j <= s.prefix + i)
    work, out = OP.work(o.sizes), OP.empty_output(o.sizes, "cpu")
    assert (work.flops, work.dtype) == (pairs * o.sizes.heads * 2 * (WIDTH + VALUE), dtype)
    assert work.bytes == o.q.nbytes + o.k.nbytes + o.v.nbytes + out.nbytes
    assert OP.output_bytes(o.sizes) == out.nbytes
    assert OP.operand_bytes(o.sizes) == sum(with_guards(t).nbytes for t in (o.q, o.k, o.v))


# Operands


@pytest.mark.parametrize("text", [RAGGED, *(f"{RAGGED} dtype=fp8 fp8={fp8}" for fp8 in FORMATS)])
def test_guards_stand_around_finite_tokens(text):
    o = made(text)
    for operands, tensor in itertools.product((o, o.copy()), ("q", "k", "v")):
        tensor = getattr(operands, tensor)
        around = with_guards(tensor).float()
        assert tensor.float().isfinite().all()
        assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all()
    assert o.cu_q[-1] == len(o.q) and o.cu_k[-1] == len(o.k)
    before = o.digest()
    for tensor, at in itertools.product((o.q, o.k, o.v), (0, -1)):
        guard = with_guards(tensor)[at]
        kept = guard.clone()
        guard.fill_(1.0)
        assert o.digest() != before, "a store into a guard is not seen"
        guard.copy_(kept)


@pytest.mark.parametrize("fp8", FORMATS)
def test_fp8_operands_fill_the_format(fp8):
    o, fmt = made(f"batch=3 new=40 prefix=9 heads=4 dtype=fp8 fp8={fp8}"), fp8_format(fp8)
    for name, tensor in o.live_tensors().items():
        values = tensor.float().abs()
        assert tensor.dtype == fmt.dtype and fmt.max / 16 < values.max() <= fmt.max
        assert (values == fmt.max).float().mean() < 1e-3, f"{name} is clipped"
        assert (values < fmt.smallest_normal).float().mean() < 0.05
    scales = [float(t) for t in (o.q_descale, o.k_descale, o.v_descale)]
    assert len(set(scales)) == 3 and not any(math.log2(scale).is_integer() for scale in scales)


def test_no_two_tokens_are_alike_behind_those_drawn():
    o = made("batch=1 new=9000 heads=1")
    for tensor in (o.q, o.k, o.v):
        assert len(torch.unique(tensor.flatten(1), dim=0)) == 9000


def scores(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    """Of all keys, seen or not: fp64 [heads, new, keys]."""
    return torch.einsum("qhd,khd->hqk", o.q[s.queries].double(), o.k[s.keys].double()) * o.score_scale


@each_dtype
def test_adversarial_operands_shift_scores(dtype):
    o = made(f"batch=2 new=40 heads=8 dtype={dtype}", Seeds(1, 1, adversarial=True))
    middle = scores(o, o.sequences[1]).flatten(1).median(-1).values
    assert middle[::4].min() > 80 and middle[3::4].max() < -80 and middle[[1, 2, 5, 6]].abs().max() < 40


# The reference


@each_dtype
def test_the_reference_is_what_plain_loops_give(dtype):
    o = made(f"batch=3 new=1..5 prefix=0..4 heads=2 dtype={dtype}")
    reference = OP.reference(o)
    assert (reference.sigma_fp8 is None) == (dtype == "bf16")
    scales = [1.0] * 3 if dtype == "bf16" else [d.double() for d in (o.q_descale, o.k_descale, o.v_descale)]
    q, k, v = ((t.double() * scale).tolist() for t, scale in zip((o.q, o.k, o.v), scales, strict=True))
    for s, h in itertools.product(o.sequences, range(2)):
        for i in range(s.new):
            row, seen = q[s.queries.start + i][h], range(s.keys.start, s.keys.start + s.prefix + i + 1)
            dots = [math.fsum(a * b for a, b in zip(row, k[j][h], strict=True)) for j in seen]
            weights = [math.exp((dot - max(dots)) / math.sqrt(192)) for dot in dots]
            for d in range(0, VALUE, 7):
                want = math.fsum(w * v[j][h][d] for w, j in zip(weights, seen, strict=True)) / sum(weights)
                got = reference.value[s.queries.start + i, h, d].item()
                assert abs(got - want) <= 0.02 * reference.sigma[s.queries.start + i, h, d].item()


def test_a_sample_has_the_ends_and_grows_by_the_flops_it_may_take():
    o = made("batch=5 new=70..200 prefix=0..90 heads=2")
    ends = {row for s in o.sequences for row in (s.queries.start, s.queries.stop - 1)}
    at_edges = {s.queries.start + row for s in o.sequences for row in (63, 64)}
    assert ends | at_edges <= set(sampled_rows(o, 2e8))
    assert edges(256, *TILES) == [0, 63, 64, 127, 128, 191, 192, 255]
    counts = [len(sampled_rows(o, flops) or range(675)) for flops in (1, 1e7, 1e8, 3e8, 1e12)]
    assert counts == sorted(set(counts)) and counts[0] == 1


def test_rows_of_one_key_are_v_itself():
    """No weight is rounded there: what one may err by is the output's rounding."""
    o = made("batch=3 new=1 heads=4 dtype=fp8")
    reference, value = OP.reference(o), o.v.float() * o.v_descale
    assert torch.allclose(reference.value, value, rtol=1e-6)
    assert (reference.sigma <= 2.0**-8 * value.abs() + 1e-9).all()


# What the check tells apart


def attend(o: MhaPrefillOperands, s: Sequence, seen: torch.Tensor) -> torch.Tensor:
    """seen: which keys of the sequence a query sees, bool [new, keys]"""
    weights = scores(o, s).masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, o.v[s.keys].double()).bfloat16()


@pytest.mark.parametrize("mistake", ["one key short", "one key long", "the first key lost", "no cached key"])
def test_a_mistake_of_one_key_is_caught_in_any_single_row(mistake):
    """By three times the limit at least, so whatever the seed."""
    o = made("batch=3 new=200..300 prefix=1..90 heads=4", Seeds(1, 1))
    reference, tolerance = OP.reference(o), OP.tolerance(o.sizes)
    s = max(o.sequences[1:], key=lambda s: s.new)
    key, last = torch.arange(s.length)[None], s.prefix + torch.arange(s.new)[:, None]
    seen = {
        "one key short": key < last,
        "one key long": key <= last + 1,
        "the first key lost": (key <= last) & (key > 0),
        "no cached key": (key <= last) & (key != s.prefix - 1),
    }[mistake]
    out = attend(o, s, seen)
    for row in (1, 2, 15, 16, 31, 32, 63, 64, 100, s.new - 2):
        at = slice(s.queries.start + row, s.queries.start + row + 1)
        found = compare_output(
            out[row : row + 1], Reference(reference.value[at], reference.sigma[at]), tolerance
        )
        assert found["row_error"] > 3 * found["row_limit"], row


# Implementations


def test_the_compiled_mask_says_what_every_row_sees():
    from kernels.mha_prefill.providers.torch_eager import BLOCK, block_mask

    o = made("batch=4 new=1..300 prefix=0..200 heads=1")
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
