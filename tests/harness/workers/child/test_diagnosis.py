"""What the judge says of a wrong output: of each kind of error one is planted in each op's right output, and
the sentence has to name its place and its kind."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import kernels
from harness.workers.child.diagnosis import LONGEST, Context, Layout
from harness.workers.child.diagnosis.region import in_words
from harness.workers.child.judge import Judge, judge
from kernels.op import Reference, RowGroups, Tolerance
from kernels.operands import Seeds

CASES: dict[str, dict[str, Any]] = {
    "block_scale_gemm": {"m": 64, "n": 512, "k": 512},
    "fused_moe": {"tokens": 48, "experts": 16, "topk": 2, "hidden": 512, "inter": 256},
    "mla_decode": {"batch": 12, "ctx": "20..200", "heads": 16},
    "mha_prefill": {"batch": 3, "new": "40..100", "heads": 4},
}
ROW = {"block_scale_gemm": "row", "fused_moe": "token", "mla_decode": "sequence", "mha_prefill": "token"}
"""What an index of the first dimension counts."""


@dataclass
class Problem:
    """A case with its right output, and what its judge knows."""

    op: Any
    sizes: Any
    operands: Any
    reference: Reference
    context: Context

    @property
    def right(self) -> torch.Tensor:
        return self.reference.value.bfloat16()

    def report(self, out: torch.Tensor) -> dict[str, Any]:
        found = judge(
            out, self.reference, self.op.tolerance(self.sizes), tuple(out.shape), context=self.context
        )
        assert len(found["reason"]) <= LONGEST
        return found

    def said(self, out: torch.Tensor) -> tuple[str, str]:
        """The kind, and the sentence up to the worst element."""
        found = self.report(out)
        assert not found["ok"]
        return found["diagnosis"]["kind"], found["reason"].partition("; worst")[0]


@functools.cache
def problem(name: str) -> Problem:
    op = kernels.OPS[name]
    sizes = op.sizes(CASES[name])
    operands, others = (op.make(sizes, Seeds(0, live), "cpu") for live in (0, 1))
    reference = op.reference(operands)
    layout = Layout.of(reference.value.shape, op.axes, None, op.row_groups(operands))
    context = Context(layout, op.sums, {"the first operands": op.reference(others)})
    return Problem(op, sizes, operands, reference, context)


each_op = pytest.mark.parametrize("name", CASES)
flat_and_of_heads = pytest.mark.parametrize("name", ["block_scale_gemm", "mha_prefill"])


def changed(of: Problem, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    out = of.right.clone()
    change(out)
    return out


def rows(name: str, numbers: str) -> str:
    """Some rows as the op's sentences have them; of prefill all are of the first sequence."""
    plural = "s" if ".." in numbers else ""
    return f"{ROW[name]}{plural} {numbers}" + " of sequence 0" * (name == "mha_prefill")


@each_op
def test_a_right_output_has_no_diagnosis_and_a_factor_is_told(name):
    of = problem(name)
    report = of.report(of.right)
    assert report["ok"]
    assert "diagnosis" not in report
    assert of.report(of.right * 1.03125)["diagnosis"]["factor"] == pytest.approx(1.03125, rel=2e-3)


def part(where: Any, change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """An output a part of which is another, made of the right output."""

    def of(right: torch.Tensor) -> torch.Tensor:
        out = right.clone()
        out[where] = change(right)
        return out

    return of


def filled(where: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return part(where, lambda right: value)


def order(columns: Callable[[int], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda right: right[..., columns(right.shape[-1])]


def swapped(first: int, second: int) -> Callable[[int], np.ndarray]:
    """Two blocks of 32 columns are in each other's place."""

    def columns(size: int) -> np.ndarray:
        blocks = np.arange(size).reshape(-1, 32)
        blocks[[first, second]] = blocks[[second, first]]
        return blocks.flatten()

    return columns


def interleaved(size: int) -> np.ndarray:
    return np.arange(size).reshape(2, -1).T.flatten()


moved_columns = part(np.s_[..., 32:64], lambda right: right[..., 64:96])


def scaled_rows(right: torch.Tensor) -> torch.Tensor:
    return right * torch.linspace(0.5, 1.5, len(right)).view(-1, *[1] * (right.ndim - 1)).bfloat16()


ERRORS = [
    (part(3, lambda right: 2 * right[3]), "factor", ", in {row 3}: doubled: 2 times the reference"),
    (part(np.s_[4:8], lambda right: 2 * right[4:8]), "factor", ", in {row 4..7}: doubled: 2 times"),
    (filled(np.s_[4:7, ..., 64:128], 0.0), "zero", "{row 4..6}, columns 64..127 (tile 1 of 64): all zero"),
    (filled(np.s_[4:7, ..., 64:96], 0.0), "zero", "{row 4..6}, columns 64..95 (tile 2 of 32): all zero"),
    (filled(np.s_[4:7, ..., 5:21], 0.0), "zero", "{row 4..6}, columns 5..20: all zero"),
    (filled(np.s_[4:7, ..., 33], 0.0), "zero", "{row 4..6}, column 33: all zero"),
    (filled(np.s_[4:7, ..., 3::16], 0.0), "zero", "{row 4..6}, every 16th column from 3: all zero"),
    (filled(np.s_[4, ..., 64:128], np.nan), "NaN", "are NaN (never written, or computed from NaN)"),
    (filled(np.s_[4, ..., 64:128], np.nan), "NaN", "in {row 4}, columns 64..127 (tile 1 of 64)"),
    (filled(np.s_[4, ..., 7], np.inf), "infinite", "column 7"),
    (filled(..., 50.0), "constant", "all 50, as if never written"),
    (lambda right: right * 0.5, "factor", "half"),
    (lambda right: -right, "factor", "sign flipped"),
    (lambda right: right * 1.9375, "factor", ": 1.94 times"),
    (lambda right: right * 1.03125, "factor", ": 1.031 times"),
    (scaled_rows, "factors", "a factor of its own for each row, 0.5 to 1.5 times"),
    (lambda right: right + 4 * right.abs().mean(), "offset", "more than the reference"),
    (lambda right: right.roll(-1, 0), "moved", "{name} i holds the answer of {name} i+1"),
    (part([3, 8], lambda right: right[[8, 3]]), "swapped", "{name}s 3 and 8 are swapped"),
    (part(5, lambda right: right[2]), "moved", "{name} 5 holds the answer of {name} 2"),
    (lambda right: right[:1].expand_as(right).clone(), "moved", "they hold the answer of {name} 0"),
    (lambda right: right.roll(-8, -1), "shifted columns", "column c holds the answer of column c+8"),
    (lambda right: right.roll(1, -1), "shifted columns", "column c holds the answer of column c-1"),
    (order(lambda size: np.arange(size) ^ 1), "swapped columns", "neighbouring columns are swapped"),
    (order(swapped(2, 3)), "swapped columns", "neighbouring blocks of 32 columns are swapped"),
    (order(swapped(1, 2)), "swapped columns", "columns 32..63 and 64..95 are swapped"),
    (order(interleaved), "interleaved columns", "two halves of the columns are interleaved"),
    (moved_columns, "shifted columns", "they hold the answer of columns 64..95"),
]


@flat_and_of_heads
@pytest.mark.parametrize(("make", "kind", "text"), ERRORS, ids=[text for *_, text in ERRORS])
def test_an_error_is_named_with_its_place(name, make, kind, text):
    of = problem(name)
    report = of.report(make(of.right))
    wanted = re.sub(r"\{row (.*?)\}", lambda found: rows(name, found[1]), text.replace("{name}", ROW[name]))
    assert not report["ok"]
    assert (report["diagnosis"]["kind"], wanted in report["reason"]) == (kind, True), report["reason"]


@pytest.mark.parametrize("name", ["block_scale_gemm", "fused_moe", "mla_decode"])
def test_factors_of_blocks_of_columns_are_told_from_one(name):
    of = problem(name)
    factors = torch.tensor([2.0, 0.5, 4.0, 0.25]).repeat_interleave(128).bfloat16()
    kind, said = of.said(of.right * factors)
    assert (kind, "a factor of its own for each 128 columns, 0.25 to 4 times" in said) == ("factors", True)


HEADS = [
    (filled(np.s_[:, 2], 0.0), "rows are off, in head 2: all zero"),
    (filled(np.s_[3, 1:3, 64:128], 0.0), "heads 1..2, columns 64..127 (tile 1 of 64): all zero"),
    (part(np.s_[:, [1, 3]], lambda right: right[:, [3, 1]]), "in heads 1 and 3: heads 1 and 3 are swapped"),
]


@pytest.mark.parametrize("name", ["mla_decode", "mha_prefill"])
@pytest.mark.parametrize(("make", "text"), HEADS, ids=[text for _, text in HEADS])
def test_heads_are_named(name, make, text):
    assert text in problem(name).report(make(problem(name).right))["reason"]


def test_only_parts_of_a_box_are_said_to_be_parts():
    of = problem("mla_decode")
    report = of.report(filled((range(8), range(8)), 0.0)(of.right))
    assert ", in parts of sequences 0..7, heads 0..7: all zero" in report["reason"]


def test_tokens_of_prefill_are_named_by_their_sequence():
    of = problem("mha_prefill")
    begins, ends = zip(*((s.queries.start, s.queries.stop) for s in of.operands.sequences), strict=True)
    for where, text in (
        (slice(begins[1], ends[1]), ", in sequence 1: all zero"),
        (slice(begins[1] + 16, begins[1] + 32), ", in tokens 16..31 (tile 1 of 16) of sequence 1: all zero"),
        ([end - 1 for end in ends], ", in the last token of each sequence: all zero"),
        (list(begins), ", in token 0 of each sequence: all zero"),
    ):
        assert text in of.report(filled(where, 0.0)(of.right))["reason"]


def test_tokens_of_an_expert_are_named_by_it():
    of = problem("fused_moe")
    ids = of.context.layout.groups.of
    expert = int(ids.flatten().bincount().argmax())
    tokens = (ids == expert).any(1)
    _, said = of.said(changed(of, lambda out: out.mul_(torch.where(tokens, 1.5, 1.0).bfloat16()[:, None])))
    count = int(tokens.sum())
    assert f", in the {count} tokens of expert {expert}: 1.5 times the reference" in said


def test_an_expert_all_of_whose_tokens_are_right_is_not_blamed():
    of = problem("fused_moe")
    _, said = of.said(changed(of, lambda out: out[3:5].mul_(1.5)))
    assert "expert" not in said


def test_places_of_sampled_rows_are_their_numbers():
    of = problem("mla_decode")
    numbers, full = [0, 5, 9], of.reference
    sampled = replace(full, value=full.value[numbers], sigma=full.sigma[numbers], rows=numbers)
    layout = replace(of.context.layout, rows=numbers)
    out = changed(of, lambda out: out[9, 4].zero_())
    report = judge(out, sampled, of.op.tolerance(of.sizes), tuple(out.shape), context=Context(layout))
    assert report["reason"].startswith("1 of 48 sampled rows are off, in sequence 9, head 4: all zero")
    assert report["diagnosis"]["worst"]["at"][:2] == [9, 4]


def test_the_worst_element_has_its_place_and_both_values():
    of = problem("block_scale_gemm")
    out = changed(of, lambda out: out[7, 300].add_(60 * of.reference.sigma[7, 300].bfloat16()))
    report = of.report(out)
    worst = report["diagnosis"]["worst"]
    assert worst["at"] == [7, 300]
    assert worst["output"] == float(out[7, 300])
    assert worst["reference"] == float(of.reference.value[7, 300])
    assert worst["sigmas"] == pytest.approx(60, abs=3)
    assert f"; worst [7, 300]: {worst['output']:.4g}, not {worst['reference']:.4g}, " in report["reason"]


def test_of_equal_rows_the_nearest_is_named():
    """All heads give the same where a sequence has one token."""
    value = torch.randn(4, 1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value = value.expand(4, 8, 64).contiguous()
    context = Context(Layout.of(value.shape, ("sequence", "head", "column")))
    limits, reference = Tolerance(row=2.0, element=10.0), Reference(value, value.abs() * 2.0**-9 + 1e-9)
    report = judge(value.flip(0).clone(), reference, limits, context=context)
    assert ": sequences 0 and 3, 1 and 2 are swapped" in report["reason"]
    assert report["diagnosis"]["from"] == [[0, 3], [1, 2], [2, 1], [3, 0]]


@each_op
def test_an_answer_to_other_operands_is_named(name):
    of = problem(name)
    (other,) = of.context.others.values()
    kind, said = of.said(other.value.bfloat16())
    assert kind == "stale"
    assert said.endswith("it is the answer to the first operands")
    kind, said = of.said(changed(of, lambda out: out[2].copy_(other.value[2])))
    assert (kind, rows(name, "2") in said) == ("stale", True)
    numbers = [row for row in range(len(other.value)) if row != 3]  # of another sample
    sampled = replace(other, value=other.value[numbers], sigma=other.sigma[numbers], rows=numbers)
    known = replace(of, context=replace(of.context, others={"a sample": sampled}))
    assert known.said(other.value.bfloat16())[1].endswith("it is the answer to a sample")


def test_the_judge_knows_the_references_it_made():
    asked = Judge()
    asked.hello("cpu", "cpu", 1)
    for name, seeds in (("first", {}), ("live", {"live": 1}), ("other", {"stationary": 1, "live": 1})):
        asked.reference(f"{name} core", "fused_moe", CASES["fused_moe"], "core", seeds)

    def reason(of: str, answer: str) -> str:
        out = asked.references[f"{answer} core"][0].value.bfloat16()
        data = out.view(torch.uint8).numpy().tobytes()
        report = asked.judge(f"{of} core", data, tuple(out.shape), "bfloat16")
        return report["reason"].partition("; worst")[0].rpartition(": ")[2]

    assert reason("first", "first") == ""
    assert reason("live", "first") == "it is the answer to the first operands"
    assert reason("other", "first") == "it is the answer to the first operands"
    assert reason("other", "live") == "it is the answer to the other live operands"


@pytest.mark.parametrize(("factor", "text"), [(0, "each sum is missing"), (2, "each sum was added twice")])
def test_a_part_of_a_sum_is_named(factor, text):
    of = problem("block_scale_gemm")
    other = of.operands.replaced(a_scale=of.operands.a_scale.clone())
    other.a_scale[:, 1] *= factor
    kind, said = of.said(of.op.reference(other).value.bfloat16())
    assert (kind, text in said) == ("part of a sum", True)


@each_op
@pytest.mark.parametrize(("format", "bits"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
def test_coarse_rounding_is_named(name, format, bits):
    of = problem(name)
    # Each row within what fp8 holds, as by a scale of its own that is a power of two.
    exponent = torch.frexp(of.reference.value.abs().amax(-1, keepdim=True)).exponent - 8
    near = torch.ldexp(of.reference.value, -exponent).float()
    out = torch.ldexp(near.to(format).double(), exponent).bfloat16()
    kind, said = of.said(out)
    assert (kind, f"rounding the output to {bits} bits of mantissa" in said) == ("rounding", True), said


@flat_and_of_heads
@pytest.mark.parametrize("sigmas", [5, 50, 5000])
@pytest.mark.parametrize("where", ["everywhere", "row", "tile"])
def test_noise_has_no_kind(name, sigmas, where):
    of = problem(name)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(of.right.shape, generator=generator, dtype=torch.float64)
    part = {"everywhere": ..., "row": (4,), "tile": (slice(4, 8), ..., slice(64, 128))}[where]
    out = of.reference.value.double().clone()
    out[part] += (sigmas * of.reference.sigma * noise)[part]
    report = of.report(out.bfloat16())
    assert report["diagnosis"]["kind"] in ("noise", "irregular", "element"), report["reason"]
    if where == "tile" and sigmas >= 20:
        assert "columns 64..127 (tile 1 of 64)" in report["reason"]
    if where != "tile" and sigmas >= 5:
        assert "column" not in report["reason"]


@each_op
def test_one_element_has_no_kind(name):
    of = problem(name)
    at = (3,) * (of.right.ndim - 1) + (37,)
    out = changed(of, lambda out: out[at].add_(40 * of.reference.sigma[at].bfloat16()))
    kind, said = of.said(out)
    assert kind in ("element", "irregular")
    assert ", column 37: " in said


def test_a_verdict_stands_without_a_diagnosis(monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no words")

    monkeypatch.setattr("harness.workers.child.judge.of_errors", fails)
    of = problem("mla_decode")
    report = of.report(changed(of, lambda out: out[3].zero_()))
    assert not report["ok"]
    assert report["reason"] == "16 of 192 rows are off; no diagnosis: RuntimeError: no words"
    assert "diagnosis" not in report


def test_an_op_that_names_no_axes_has_rows_and_columns():
    value = torch.linspace(1, 2, 3 * 4 * 32, dtype=torch.float64).view(3, 4, 32)
    out = value.clone()
    out[1, 2].zero_()
    report = judge(out, Reference(value, value * 2.0**-9), Tolerance(row=2.0, element=10.0))
    assert report["reason"].startswith("1 of 12 rows are off, in row 1, index 1 2: all zero")


def test_exact_zeros_have_no_sigma_to_be_in():
    value = torch.zeros(2, 32, dtype=torch.float64)
    out = value.clone()
    out[1] = 3.0
    report = judge(out, Reference(value, value), Tolerance(row=2.0, element=10.0))
    assert report["diagnosis"]["worst"]["sigmas"] is None
    said = "1 of 2 rows are off, in row 1: all 3, as if never written; worst [1, 0]: 3, not 0"
    assert report["reason"] == said


@pytest.mark.parametrize(
    ("indices", "size", "text"),
    [
        ([7], 16, "head 7"),
        ([8, 9, 10], 16, "heads 8..10"),
        ([3, 7], 16, "heads 3 and 7"),
        ([1, 2, 5, 9, 10], 16, "heads 1..2, 5 and 9..10"),
        ([0, 2, 4, 6], 8, "every 2nd head from 0"),
        ([*range(128, 256)], 512, "heads 128..255 (tile 1 of 128)"),
        ([*range(64, 192)], 512, "heads 64..191 (tiles 1..2 of 64)"),
        ([*range(256, 300)], 300, "heads 256..299, to the end"),
        ([*range(16, 32), *range(48, 64), *range(80, 96)], 96, "heads 16..31 of every 32"),
        ([0, 3, 4, 9, 11, 17, 30], 40, "7 of heads 0..30"),
    ],
)
def test_numbers_as_ranges(indices, size, text):
    assert in_words("head", indices, range(size)) == text


def test_groups_of_one_row_are_not_named():
    groups = RowGroups("expert", torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]]))
    value = torch.linspace(1, 2, 4 * 32, dtype=torch.float64).view(4, 32)
    out = value.clone()
    out[1] *= 3
    context = Context(Layout.of(value.shape, ("token", "column"), None, groups))
    report = judge(out, Reference(value, value * 2.0**-9), Tolerance(row=2.0, element=10.0), context=context)
    assert ", in token 1: 3 times the reference" in report["reason"]
