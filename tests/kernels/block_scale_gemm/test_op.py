"""Block-scale GEMM: sizes, work, operands, the reference, and what the check distinguishes."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import kernels
from harness.workers.child.judge import compare_output
from kernels.block_scale_gemm.mistakes import tile_of, without_the_largest_code
from kernels.formats import BLOCK, FORMATS, dequantise_activations, dequantise_weights, rounding_deviation
from kernels.operands import Seeds
from shapes.case import parse

OP = kernels.OPS["block_scale_gemm"]


def sizes_of(text: str):
    return OP.sizes(parse(text)[0])


@pytest.mark.parametrize("text", ["m=3 n=130 k=257", "m=1 n=1 k=1", "m=4 n=128 k=256 fp8=e4m3fnuz"])
@pytest.mark.parametrize("boundary", OP.boundaries)
def test_work_is_what_counting_gives(text, boundary):
    sizes = sizes_of(text)
    operands, out = OP.operands(sizes, Seeds(), "cpu", boundary), OP.empty_output(sizes, "cpu")
    read = sum(tensor.nbytes for tensor in operands.tensors().values())
    streamed = sum(operands.tensors()[name].nbytes for name in operands.streamed)
    work = OP.work(sizes, boundary)
    assert (work.flops, work.bytes) == (2 * sizes.m * sizes.n * sizes.k, read + out.nbytes)
    assert OP.output_bytes(sizes) == out.nbytes
    assert (OP.streamed_bytes(sizes), OP.streamed_bytes(sizes, 3)) == (streamed, 3 * streamed)
    assert OP.operand_bytes(sizes) >= read


@pytest.mark.parametrize("text", ["m=40 n=700 k=1400", "m=40 n=700 k=1400 fp8=e4m3fnuz scales=ue8m0"])
def test_neighbouring_scales_differ_by_a_factor_of_two_at_least(text):
    operands = OP.operands(sizes_of(text), Seeds(), "cpu")

    def least_octaves(scale: torch.Tensor, dim: int) -> float:
        """Between neighbours, except for blocks of zeros."""
        octaves = scale.double().log2().diff(dim=dim).abs()
        return float(octaves[octaves < 100].min())

    octave_in_bf16 = 1 - 2.0**-6  # at least, because both magnitudes are rounded
    assert least_octaves(operands.b_scale, 0) >= 1 - 1e-6
    assert least_octaves(operands.b_scale, 1) >= 1 - 1e-6
    assert least_octaves(operands.a_scale, 0) >= octave_in_bf16
    assert least_octaves(operands.a_scale[::2], 1) >= octave_in_bf16


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_quantised_normal_data(name):
    operands = OP.operands(sizes_of(f"m=64 n=512 k=1024 fp8={name}"), Seeds(), "cpu")
    largest = FORMATS[name].max
    for q in (operands.a_q, operands.b_q):
        assert q.float().abs().max() == largest
        assert torch.isfinite(q.float()).all()
    blocks = operands.b_q.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    assert blocks.abs().amax((1, 3)).min() > 0.8 * largest
    assert 3.5 < largest / blocks.std((1, 3)).median() < 5
    even_rows = operands.a_q[:58:2].float().unflatten(1, (-1, 128))  # row 58 is zero
    assert (even_rows.abs().amax(2) == largest).all()
    assert len(operands.b_q.view(torch.int8).unique(dim=0)) == 512, "no two rows are equal"
    assert len(operands.a_q.view(torch.int8).unique(dim=0)) == 64, "no two rows are equal"


def test_some_rows_have_zeros_or_outliers():
    a = OP.operands(sizes_of("m=64 n=128 k=2048"), Seeds(), "cpu", "with_quant").a.float()
    is_zero = a.unflatten(1, (-1, 128)).abs().amax(2) == 0  # of each block
    assert torch.isfinite(a).all()
    assert is_zero.all(1).sum() == 1
    assert (is_zero.any(1) & ~is_zero.all(1)).sum() >= 4
    largest_by_median = a.abs().amax(1) / a.abs().median(1).values
    assert (largest_by_median[3::8] > 1000).all() and (largest_by_median[:58:2] < 20).all()


def test_adversarial_operands_are_what_they_say():
    o = OP.operands(sizes_of("m=16 n=600 k=512"), Seeds(1, 1, adversarial=True), "cpu", "with_quant")
    a, b = o.a.float(), o.b_q.float()
    assert a[7].abs().max() == 0 and a[1].abs().max() > 65504 and 1e-7 < a[4].abs().max() < 1e-4
    assert bool(torch.signbit(a[5, :BLOCK]).any()) and a[5, :BLOCK].abs().max() == 0
    assert torch.equal(a[6, :BLOCK], -a[6, BLOCK : 2 * BLOCK])
    assert a[2, :BLOCK].abs().argmax() == 0 and a[2, BLOCK : 2 * BLOCK].abs().argmax() == BLOCK - 1
    assert set(b[3].abs().tolist()) == {448.0}
    assert b[3 * BLOCK : 4 * BLOCK, 3 * BLOCK : 4 * BLOCK].abs().max() == 0


@pytest.mark.parametrize("name", FORMATS)
def test_the_wrong_kernel_reads_the_largest_code_as_the_next_smaller_one(name):
    o = OP.operands(sizes_of(f"m=1 n=128 k=256 fp8={name}"), Seeds(), "cpu")
    tile = tile_of(o, None, torch.arange(1), torch.arange(128))
    codes = torch.arange(256, dtype=torch.uint8).view(o.b_q.dtype).float().nan_to_num(0.0)
    read = without_the_largest_code(replace(tile, b=codes))
    assert torch.equal(read.unique(), codes.unique()[1:-1])


@pytest.mark.parametrize("text", ["m=3 n=131 k=140", "m=2 n=5 k=300 fp8=e4m3fnuz"])
@pytest.mark.parametrize("boundary", OP.boundaries)
def test_the_reference_is_what_plain_loops_give(text, boundary):
    sizes = sizes_of(text)
    o = OP.operands(sizes, Seeds(), "cpu", boundary)
    reference = OP.reference(o)
    products = 2 if boundary == "core" else 3  # that the reference computes
    flops = products * OP.work(sizes, boundary).flops
    assert OP.reference(o, flops).rows is None, "all rows"
    assert OP.reference(o, flops - 1).rows is not None, "a sample"
    b_q, b_scale = o.b_q.double().tolist(), o.b_scale.tolist()
    for m, n in itertools.product(range(sizes.m), range(sizes.n)):
        if o.a is None:
            scales = o.a_scale[m].tolist()
            a = [value * scales[k // 128] for k, value in enumerate(o.a_q[m].double().tolist())]
        else:
            a = o.a[m].double().tolist()
        b = [b_q[n][k] * b_scale[n // 128][k // 128] for k in range(sizes.k)]
        terms = [a[k] * b[k] for k in range(sizes.k)]
        norm = math.hypot(*terms)
        out = math.fsum(terms)
        assert abs(out - float(reference.value[m, n])) <= 1e-5 * norm
        rounded_operands = 2 if boundary == "core" else 1
        sigma = 2.0**-9 * math.sqrt(out**2 + rounded_operands * norm**2)
        assert float(reference.sigma[m, n]) == pytest.approx(sigma, rel=1e-4)
        if boundary == "core":
            assert reference.sigma_fp8 is None
            continue
        rounding = rounding_deviation(o.a, FORMATS[sizes.fp8])[m].tolist()
        errors = [rounding[k] * b[k] for k in range(sizes.k)]
        sigma_fp8 = math.hypot(sigma, 2.0**-9 * norm, *errors)
        assert float(reference.sigma_fp8[m, n]) == pytest.approx(sigma_fp8, rel=1e-4)


def test_the_check_refuses_an_output_without_any_one_block_of_k():
    """Each of 144 blocks is left out, in the last tile of columns, which is not full."""
    sizes = sizes_of("m=2 n=576 k=18432")
    o = OP.operands(sizes, Seeds(), "cpu")
    reference, columns = OP.reference(o), slice((sizes.n_blocks - 1) * BLOCK, sizes.n)
    a = dequantise_activations(o.a_q[:1], o.a_scale[:1])
    products = a * dequantise_weights(o.b_q, o.b_scale)[columns]
    for block in range(sizes.k_blocks):
        out = reference.value.bfloat16()
        lost = products[:, block * BLOCK : (block + 1) * BLOCK].sum(1)
        out[0, columns] = (reference.value[0, columns] - lost).bfloat16()
        assert not compare_output(out, reference, OP.tolerance(sizes))["ok"], f"block {block}"
