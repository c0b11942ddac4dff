"""What the judge says of a wrong output: of each kind of error one is planted in each op's right output, and
the sentence has to name its place and its kind."""

import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kernels
from harness.workers.child import diagnosis
from harness.workers.child.diagnosis import LONGEST, Layout
from harness.workers.child.judge import Judge, compare_output
from harness.workers.child.outputs import OwnedOutput
from kernels.op import Reference, RowGroups, Tolerance
from kernels.operands import Seeds
from shapes.case import Case

CASES: dict[str, dict[str, Any]] = {
    "block_scale_gemm": {"m": 64, "n": 512, "k": 512},
    "fused_moe": {"tokens": 48, "experts": 16, "topk": 2, "hidden": 512, "inter": 256},
    "mla_decode": {"batch": 12, "ctx": "20..200", "heads": 16},
    "mha_prefill": {"batch": 3, "new": "40..100", "heads": 4},
}


@dataclass
class Problem:
    """A case with its right output, and what its judge knows."""

    op: Any
    sizes: Any
    operands: Any
    reference: Reference
    layout: Layout

    @property
    def right(self) -> torch.Tensor:
        return self.reference.value.bfloat16()

    def report(self, out: torch.Tensor) -> dict[str, Any]:
        limits = self.op.tolerance(self.sizes)
        found = compare_output(out, self.reference, limits, tuple(out.shape), layout=self.layout)
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
    known = {"the first operands": op.reference(others)}
    layout = Layout(tuple(reference.value.shape), op.axes, None, op.row_groups(operands), known)
    return Problem(op, sizes, operands, reference, layout)


each_op = pytest.mark.parametrize("name", CASES)


def changed(of: Problem, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    out = of.right.clone()
    change(out)
    return out


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


def scaled_rows(right: torch.Tensor) -> torch.Tensor:
    return right * torch.linspace(0.5, 1.5, len(right)).view(-1, *[1] * (right.ndim - 1)).bfloat16()


ERRORS = {
    "row 3 doubled": part(3, lambda right: 2 * right[3]),
    "a tile of zeros": filled(np.s_[4:7, ..., 64:128], 0.0),
    "columns of zeros": filled(np.s_[4:7, ..., 5:21], 0.0),
    "some columns of zeros": filled(np.s_[4:7, ..., 3::16], 0.0),
    "a tile of NaN": filled(np.s_[4, ..., 64:128], np.nan),
    "an infinite one": filled(np.s_[4, ..., 7], np.inf),
    "50 everywhere": filled(..., 50.0),
    "half": lambda right: right * 0.5,
    "negative": lambda right: -right,
    "1.03125 times": lambda right: right * 1.03125,
    "each row another factor": scaled_rows,
    "a row late": lambda right: right.roll(-1, 0),
    "rows 3 and 8 swapped": part([3, 8], lambda right: right[[8, 3]]),
    "row 2 in row 5": part(5, lambda right: right[2]),
    "row 0 in all": lambda right: right[:1].expand_as(right).clone(),
    "a column early": lambda right: right.roll(1, -1),
    "another block's columns": part(np.s_[..., 32:64], lambda right: right[..., 64:96]),
}
"""Of outputs of any op."""


def planted(name: str, of: Problem) -> dict[str, torch.Tensor]:
    """Outputs of one."""
    right, value = of.right, of.reference.value
    (other,) = of.layout.others.values()
    made = {"another answer": other.value.bfloat16()}
    made["another answer in row 2"] = part(2, lambda _: other.value[2])(right)
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    places = {"all": ..., "row 4": (4,), "a tile": np.s_[4:8, ..., 64:128]}
    for (where, at), sigmas in itertools.product(places.items(), (5, 50, 5000)):
        noisy = value + sigmas * of.reference.sigma * noise
        made[f"{sigmas} sigma in {where}"] = part(at, lambda _, noisy=noisy, at=at: noisy[at])(right)
    at = (*(min(3, size - 1) for size in right.shape[:-1]), 37)
    made["40 sigma in one"] = part(at, lambda _: (value + 40 * of.reference.sigma)[at])(right)
    if "head" in of.op.axes:
        made["head 2"] = filled(np.s_[..., 2, :], 0.0)(right)
        made["a tile of heads 1 and 2"] = filled(np.s_[3, ..., 1:3, 64:128], 0.0)(right)
        swap = part(np.s_[..., [1, 3], :], lambda right: right[..., [3, 1], :])
        made["heads 1 and 3 swapped"] = swap(right)
    if name == "mla_decode":
        made["a head of each of 8 sequences"] = filled((range(8), 0, range(8)), 0.0)(right)
    if name == "mha_prefill":
        begins, ends = zip(*((s.queries.start, s.queries.stop) for s in of.operands.sequences), strict=True)
        made["sequence 1"] = filled(slice(begins[1], ends[1]), 0.0)(right)
        made["a tile of it"] = filled(slice(begins[1] + 16, begins[1] + 32), 0.0)(right)
        made["each last token"] = filled([end - 1 for end in ends], 0.0)(right)
        made["each first token"] = filled(list(begins), 0.0)(right)
    if name == "fused_moe":
        ids = of.layout.groups.of
        tokens = (ids == int(ids.flatten().bincount().argmax())).any(1)
        made["an expert's tokens"] = right * torch.where(tokens, 1.5, 1.0).bfloat16()[:, None]
        made["tokens of several"] = part(np.s_[3:5], lambda right: 1.5 * right[3:5])(right)
    if name == "block_scale_gemm":
        for how, factor in (("without", 0), ("twice", 2)):
            changed = of.operands.replaced(a_scale=of.operands.a_scale.clone())
            changed.a_scale[:, 1] *= factor
            made[f"a block of k {how}"] = of.op.reference(changed).value.bfloat16()
    return made


@each_op
def test_what_is_said_of_wrong_outputs_is_as_committed(snapshot, name):
    of, errors = problem(name), ERRORS if name in ("block_scale_gemm", "mha_prefill") else {}
    made = {how: make(of.right) for how, make in errors.items()} | planted(name, of)
    said = {how: ": ".join(of.said(out)) for how, out in made.items()}
    text = "".join(f"{how}\n    {sentence}\n" for how, sentence in said.items())
    snapshot(Path(__file__).parent / "snapshots" / f"diagnosis-{name}.txt", text)


def test_what_was_never_written_is_told_from_computed_nan():
    of, out = problem("mla_decode"), OwnedOutput(problem("mla_decode").right, "cpu")
    out.fill()
    assert of.said(out.tensor) == ("not written", "98304 of 98304 outputs were never written")
    out.tensor[2] = of.right[2]
    out.tensor[3, 0, 0] = math.nan
    said = "89600 of 98304 outputs were never written and NaN was computed in 512 of 98304 outputs"
    assert of.said(out.tensor)[1].startswith(said)


def test_places_of_sampled_rows_are_their_numbers():
    of = problem("mla_decode")
    numbers, full = [0, 5, 9], of.reference
    sampled = replace(full, value=full.value[numbers], sigma=full.sigma[numbers], rows=numbers)
    layout = replace(of.layout, rows=numbers)
    out = changed(of, lambda out: out[9, 0, 4].zero_())
    report = compare_output(out, sampled, of.op.tolerance(of.sizes), tuple(out.shape), layout=layout)
    assert report["reason"].startswith("1 of 48 sampled rows are off, in sequence 9, head 4: all zero")
    assert (report["rows"], report["of_rows"]) == (48, 192)
    assert report["diagnosis"]["worst"]["at"][:3] == [9, 0, 4]


def test_an_answer_to_operands_of_which_other_rows_are_known_is_named():
    of = problem("block_scale_gemm")
    (other,) = of.layout.others.values()
    numbers = [row for row in range(len(other.value)) if row != 3]
    sampled = replace(other, value=other.value[numbers], sigma=other.sigma[numbers], rows=numbers)
    known = replace(of, layout=replace(of.layout, others={"a sample": sampled}))
    assert known.said(other.value.bfloat16())[1].endswith("it is the answer to a sample")


def test_the_judge_knows_the_references_it_made():
    asked = Judge()
    asked.hello("cpu", "cpu", 1)
    for name, seeds in (("first", {}), ("live", {"live": 1}), ("other", {"stationary": 1, "live": 1})):
        asked.reference(f"{name} core", Case("fused_moe", CASES["fused_moe"]), seeds)

    def reason(of: str, answer: str) -> str:
        out = asked.references[f"{answer} core"].reference.value.bfloat16()
        data = out.view(torch.uint8).numpy().tobytes()
        report = asked.judge(f"{of} core", data, tuple(out.shape), "bfloat16")
        return report["reason"].partition("; worst")[0].rpartition(": ")[2]

    assert reason("first", "first") == ""
    assert reason("live", "first") == "it is the answer to the first operands"
    assert reason("other", "first") == "it is the answer to the first operands"
    assert reason("other", "live") == "it is the answer to the other live operands"


def test_a_verdict_stands_without_a_diagnosis(monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no words")

    monkeypatch.setattr("harness.workers.child.judge.of_errors", fails)
    of = problem("mla_decode")
    report = of.report(changed(of, lambda out: out[3].zero_()))
    assert not report["ok"]
    assert report["reason"] == "16 of 192 rows are off; no diagnosis: RuntimeError: no words"
    assert "diagnosis" not in report


def test_mistakes_are_compared_up_to_the_limit_of_work_and_in_enough_elements(monkeypatch):
    right = torch.linspace(1, 2, 64).double().view(2, 32)
    wrong, large = right + 0.5 * right.square(), right**4

    def said(columns: slice = slice(None)) -> str:
        def answers(rows: list[int], across: slice) -> dict[str, Callable[[], torch.Tensor]]:
            every = {"near": wrong, "far": large, "again": wrong}
            return {name: lambda of=of: 1 * of[rows][:, columns][:, across] for name, of in every.items()}

        part = right[:, columns]
        layout = Layout(part.shape, answers=answers)
        limits = Tolerance(row=2.0, element=10.0)
        found = compare_output(wrong[:, columns], Reference(part, part * 2.0**-9), limits, layout=layout)
        return found["reason"]

    assert "equals: near or again" in said()
    assert "equals" not in said(slice(0, 15))
    monkeypatch.setattr("kernels.mistakes.MOST_OPERATIONS", 8)
    assert "equals: near" in said() and "again" not in said()


def test_what_is_said_of_small_outputs_is_as_committed(snapshot):
    """Of heads that are all alike, of an op that names no axes, of exact zeros, of an expert of one token."""
    value = torch.randn(4, 1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alike, plain = (
        value.expand(4, 8, 64).contiguous(),
        torch.linspace(1, 2, 4 * 4 * 32).double().view(4, 4, 32),
    )
    experts = RowGroups("expert", torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]]))
    heads, token = ("sequence", "head", "column"), plain[:, 0].clone()
    outs = [
        (alike, alike.flip(0), Layout(alike.shape, heads)),
        (plain, part((1, 2), lambda right: 0.0)(plain), Layout(plain.shape)),
        (zeros := torch.zeros(2, 32).double(), part(1, lambda right: 3.0)(zeros), Layout(zeros.shape)),
        (token, part(1, lambda right: 3 * right[1])(token), Layout(token.shape, heads[1:], None, experts)),
    ]
    limits, texts = Tolerance(row=2.0, element=10.0), []
    for right, out, layout in outs:
        report = compare_output(out, Reference(right, right.abs() * 2.0**-9), limits, layout=layout)
        facts = [report["diagnosis"].get(name) for name in ("kind", "where", "from")]
        texts.append(f"{report['reason']}\n    {facts}\n")
    snapshot(Path(__file__).parent / "snapshots" / "diagnosis-small.txt", "".join(texts))


def test_a_long_sentence_keeps_what_the_worst_element_is(monkeypatch):
    monkeypatch.setattr(diagnosis, "region_of", lambda *given: ("a place " * 40, {}))
    of = problem("mla_decode")
    reason = of.report(of.right * 1.5)["reason"]
    assert " ...; worst [" in reason and re.search(r", not \S+, \S+ sigma$", reason)
