"""The judge, in a process of its own: computes references and compares outputs with them."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kernels
from harness.errors import one_line
from harness.files import finite
from harness.plan.memory import MAX_FLOPS, kept_references
from harness.workers.child.device import OnDevice, empty_cache
from harness.workers.child.diagnosis import Layout, of_errors, of_not_finite
from harness.workers.child.outputs import Blob
from kernels.mistakes import Answers
from kernels.op import Reference, Tolerance
from kernels.operands import Operands, Seeds
from kernels.platform import available_memory
from shapes.case import Case

CHEAP = 0.005  # a reference that takes less than this share of MAX_FLOPS is computed whole
COMPARING_BYTES = 96  # to compare an element: 3 numbers of the reference, 6 of `compare_output`, and room
HOST_SHARE = 0.5  # the share of the host's free memory that the references of a GPU's case may take
FEWEST_ROWS = 8  # from fewer rows than this the scatter of their bias cannot be estimated
ROWS_AT_ONCE = 1024  # rows of the first dimension that are worked on at once, to need little memory
OPERANDS = {
    "first": "the first operands",
    "last": "the last of the sets that calls rotate over",
    "live": "the other live operands",
    "other": "the other operands",
    "lengths": "the operands of the same lengths",
}
"""What the sets of operands are called in a diagnosis (see harness.run.checks.CaseChecks.seeds)."""


@dataclass(frozen=True)
class CaseReference:
    """A reference, with its case and operands."""

    reference: Reference
    tolerance: Tolerance
    layout: Layout
    made_from: dict[str, Any]  # op, sizes, boundary and seeds of the operands
    make_operands: Callable[[], Operands]  # makes the same operands again
    operand_bytes: int


@dataclass(frozen=True)
class Judged:
    """An output that was judged."""

    reference_name: str
    tensors: dict[str, torch.Tensor]  # `output`, `reference` and `sigma`
    report: dict[str, Any]  # what `compare_output` returned


class Judge(OnDevice):
    """Each public method is one request of the parent process. References have names such as `first core`:
    the name of a set of operands and a boundary."""

    def __init__(self) -> None:
        self.references: dict[str, CaseReference] = {}
        self.judged: Judged | None = None  # for `save`: the first wrong output; until there is one, the last

    def hello(self, kind: str, device: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        ready = super().hello(kind, device, *arguments, **options)
        if kind != "cpu":
            # The first product allocates a workspace that stays. If it lay among a case's tensors, their
            # memory could not be given back.
            matrix = torch.zeros(16, 16, device=device)
            matrix @ matrix
        return ready

    def reference(self, name: str, case: Case, seeds: Mapping[str, Any], share: float = 1.0) -> int:
        """Computes a reference and keeps it under a name. Returns the digest of its operands. A sample of the
        rows is computed where all would take more than MAX_FLOPS or too much memory. A `share` below 1 allows
        only that share of the work of all rows, or CHEAP where that is more."""
        op = kernels.OPS[case.op]
        sizes = op.sizes(case.sizes)
        make_operands = partial(op.make, sizes, Seeds(**seeds), self.device, case.boundary)
        operands = make_operands()
        max_flops = MAX_FLOPS[self.kind]
        whole_flops = min(max_flops, op.work(sizes, case.boundary).flops)
        limits = [max_flops]  # in flops
        if share < 1:
            limits.append(max(CHEAP * max_flops, share * whole_flops))
        if self.kind != "cpu":  # on a CPU the plan of memory counts the references
            fitting_share = HOST_SHARE * available_memory() / kept_references(op, sizes, self.kind)
            if fitting_share < 1:
                limits.append(fitting_share * whole_flops)
        sample_offset = random.SystemRandom().random()
        reference = _moved(op.reference(operands, min(limits), sample_offset), "cpu")
        shape = tuple(op.empty_output(sizes, "meta").shape)
        all_seeds = asdict(Seeds(**seeds))
        made_from = {"op": case.op, "sizes": dict(case.sizes), "boundary": case.boundary, "seeds": all_seeds}
        self.references[name] = CaseReference(
            reference=reference,
            tolerance=op.tolerance(sizes),
            layout=Layout(shape, tuple(op.axes), reference.rows, op.row_groups(operands)),
            made_from=made_from,
            make_operands=make_operands,
            operand_bytes=sum(tensor.nbytes for tensor in operands.tensors().values()),
        )
        digest = operands.digest()
        del operands  # nothing is left on the device
        empty_cache(self.kind)
        return digest

    def judge(
        self,
        name: str,
        output: bytes | Blob,
        shape: tuple[int, ...],
        dtype: str,
        fp8: bool = False,
        truncates: bool = False,
    ) -> dict[str, Any]:
        """The report of `compare_output`, by the named reference, on an output that a worker packed. A large
        output takes the host many seconds, so that outputs are compared on the GPU where it has room. There
        is no diagnosis there: a wrong output is compared once more, on the host."""
        known = self.references[name]
        right_shape = known.layout.shape
        if [n for n in shape if n > 1] == [n for n in right_shape if n > 1]:
            shape = right_shape  # axes of length 1, such as that of one query token, may be left out
        element = getattr(torch, dtype)
        if isinstance(output, bytes):
            tensor = torch.frombuffer(bytearray(output), dtype=element).view(shape)
        else:
            tensor = output.tensor(element, shape)
        report = self._compare_on_gpu(tensor, known, fp8, truncates)
        empty_cache(self.kind)
        if report is None or not report["ok"]:
            others = self._others(name, fp8, truncates)
            layout = replace(known.layout, others=others, answers=partial(self._answers, known))
            limits = known.tolerance
            report = compare_output(tensor, known.reference, limits, right_shape, fp8, truncates, layout)
            empty_cache(self.kind)
        if self.judged is None or self.judged.report["ok"]:
            sigma = sigma_of(known.reference, fp8, truncates)
            tensors = {"output": tensor, "reference": known.reference.value, "sigma": sigma}
            self.judged = Judged(name, tensors, report)
        return report

    def _compare_on_gpu(
        self, output: torch.Tensor, known: CaseReference, fp8: bool, truncates: bool
    ) -> dict[str, Any] | None:
        """The report on an output by the GPU; None where there is no GPU with enough memory."""
        if self.kind == "cpu":
            return None
        needed_bytes = 2 * output.nbytes + COMPARING_BYTES * known.reference.value.numel()
        if needed_bytes >= torch.cuda.mem_get_info(self.device)[0]:
            return None
        try:
            moved = _moved(known.reference, self.device)
            output = output.to(self.device)
            return compare_output(output, moved, known.tolerance, known.layout.shape, fp8, truncates)
        except torch.OutOfMemoryError:  # other processes may have taken the memory meanwhile
            return None

    def _others(self, name: str, fp8: bool, truncates: bool) -> dict[str, Reference]:
        """The references to other operands in the same boundary, by what a diagnosis calls the operands."""
        operands, _, boundary = name.partition(" ")
        others = {}
        for other_name, known in self.references.items():
            other_operands, _, other_boundary = other_name.partition(" ")
            if other_boundary == boundary and other_operands != operands:
                called = OPERANDS.get(other_operands, f"the {other_operands} operands")
                sigma = sigma_of(known.reference, fp8, truncates)
                others[called] = replace(known.reference, sigma=sigma)
        return others

    def _answers(self, known: CaseReference, rows: list[int], columns: slice) -> Answers:
        """What the op's known mistakes give for these rows and columns. The operands are made again."""
        if available_memory() < 3 * known.operand_bytes:
            raise MemoryError
        mistakes = importlib.import_module(f"kernels.{known.made_from['op']}.mistakes")
        answers: Answers = mistakes.answers(known.make_operands(), rows, columns)
        return answers

    def save(self, folder: str) -> dict[str, Any]:
        """Writes `output.pt`, the whole output, and `reference.pt` and `sigma.pt` of the compared rows.
        Returns what these were made from, the rows (None: all) and the report; {} if nothing was judged."""
        if self.judged is None:
            return {}
        for file, tensor in self.judged.tensors.items():
            torch.save(tensor.contiguous(), Path(folder) / f"{file}.pt")
        known = self.references[self.judged.reference_name]
        return known.made_from | {"rows": known.reference.rows, "report": self.judged.report}


def _moved(reference: Reference, device: str) -> Reference:
    moved: dict[str, Any] = {
        name: value.to(device) for name, value in vars(reference).items() if isinstance(value, torch.Tensor)
    }
    return replace(reference, **moved)


def compare_output(
    output: torch.Tensor,
    reference: Reference,
    tolerance: Tolerance,
    shape: tuple[int, ...] | None = None,
    fp8: bool = False,
    truncates: bool = False,
    layout: Layout | None = None,
) -> dict[str, Any]:
    """Tells a right output from a wrong one by its reference.

    Errors are measured in units of sigma, the error of an element that rounding alone explains. An output is
    right if all of these hold:

    1. It has the right shape, and each element is finite, also outside the sampled rows.
    2. The error of each compared element is at most `tolerance.element` sigma.
    3. The root mean square of the errors of each row (the last dimension), or of each segment of
       `tolerance.segment` elements of it, is at most `tolerance.row` sigma.
    4. The whole output is neither too large nor too small, and of FP8 calls not too noisy (`_whole_output`).

    shape:     the right shape; None: that of the reference
    fp8, truncates: see `sigma_of`
    layout:    how the output is laid out, for the diagnosis; None: in rows and columns

    Returns, for the record:

    ok, reason:     whether the output is right, and why not
    row_error, element_error: the largest ones, in sigma, with their limits; None if not finite
    bias:           the share by which the whole output is too large (see `_bias`), with its limit
    noise:          of FP8 calls: the root mean square error in `reference.even`, in sigma, with its limit
    relative_error: |output - reference| / |reference| over all elements, for people
    rows, of_rows:  how many rows were compared, of how many
    diagnosis:      of a wrong output, the facts in its reason (see diagnosis.py)
    """
    shape = shape or tuple(reference.value.shape)
    if tuple(output.shape) != shape:
        reason = f"output has shape {tuple(output.shape)}, not {shape}"
        limits = {"row_limit": tolerance.row, "element_limit": tolerance.element}
        return {"ok": False, "reason": reason, "row_error": None, "element_error": None} | limits
    compared = output if reference.rows is None else output[reference.rows]
    error = compared.double() - reference.value
    sigma = sigma_of(reference, fp8, truncates)
    # Where sigma is 0 the right value is exact, and any error becomes infinite.
    z = torch.where(error == 0, 0.0, error / sigma)
    segments = z.split(tolerance.segment or z.shape[-1], -1)
    # Of each row: the error of its worst segment, and that of its worst element.
    row_error = torch.stack([segment.square().mean(-1).sqrt() for segment in segments], -1).amax(-1)
    element_error = z.abs().amax(-1)
    # A comparison with NaN is false, so that a row with NaN is not right.
    right_rows = (row_error <= tolerance.row) & (element_error <= tolerance.element)
    reference_norm = float(reference.value.norm())
    report: dict[str, Any] = {
        "ok": False,
        "reason": "",
        "row_error": finite(_largest(row_error)),
        "row_limit": tolerance.row,
        "element_error": finite(_largest(element_error)),
        "element_limit": tolerance.element,
        "bias": None,  # `_whole_output` gives these four, if no row is wrong
        "bias_limit": None,
        "noise": None,
        "noise_limit": None,
        "relative_error": finite(float(error.norm()) / (reference_norm if reference_norm > 0 else 1.0)),
        "rows": row_error.numel(),
        "of_rows": output.numel() // output.shape[-1],
    }
    is_finite = bool(torch.isfinite(output).all())
    if not is_finite or not bool(right_rows.all()):
        layout = layout or Layout(shape, rows=reference.rows)
        try:
            if is_finite:
                found = of_errors(compared, reference, sigma, z, ~right_rows, tolerance, layout)
            else:
                found = of_not_finite(output, layout)
            report["reason"], report["diagnosis"] = found
        except Exception as failure:  # that the output is wrong does not depend on the diagnosis
            off = f"{int((~right_rows).sum())} of {row_error.numel()} rows are off"
            report["reason"] = f"{off}; no diagnosis: {one_line(failure)}"
        return report
    report |= _whole_output(error, z, sigma, reference, tolerance, fp8, truncates)
    report["ok"] = not report["reason"]
    return report


def _whole_output(
    error: torch.Tensor,
    z: torch.Tensor,
    sigma: torch.Tensor,
    reference: Reference,
    tolerance: Tolerance,
    fp8: bool,
    truncates: bool,
) -> dict[str, Any]:
    """The bias and the noise of an output over its even rows (see Reference.even), their limits, and the
    reason if one exceeds its limit. Each row may be right although one does. z: `error` in sigma"""
    in_fp8 = fp8 and reference.sigma_fp8 is not None
    even = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device)
    if in_fp8 and reference.even is not None:
        even = reference.even
    op_limit = tolerance.bias if in_fp8 or truncates else tolerance.bias_bf16
    bias, limit = _bias(error, reference.value, sigma, even, op_limit)
    noise = None
    if in_fp8 and int(even.sum()) >= FEWEST_ROWS:
        noise = float(z[even].square().mean().sqrt())
    noise_limit = tolerance.noise if in_fp8 else None
    reason = ""
    if bias is not None and abs(bias) > limit:
        size = "large" if bias > 0 else "small"
        reason = f"the whole output is {abs(bias):.1%} too {size} (limit {limit:.1%})"
    elif noise is not None and noise_limit is not None and noise > noise_limit:
        size = f"{noise:.3g} sigma in root mean square (limit {noise_limit:g})"
        reason = f"the whole output errs by {size}, as if rounded to a format of fewer bits"
    return {"reason": reason, "bias": bias, "bias_limit": limit, "noise": noise, "noise_limit": noise_limit}


def sigma_of(reference: Reference, fp8: bool, truncates: bool) -> torch.Tensor:
    """The sigma that an output is judged by. fp8: whether the call rounds activations to FP8 itself;
    truncates: whether it truncates to bf16"""
    sigma = reference.sigma
    if fp8 and reference.sigma_fp8 is not None:
        sigma = reference.sigma_fp8
    if truncates:
        # The root mean square error is 1/sqrt(3) units in the last place; that of rounding is 1/sqrt(12).
        # So a rounding to bf16 counts four times in the variance.
        sigma = (sigma.square() + 3 * reference.sigma.square()).sqrt()
    return sigma


def _bias(
    error: torch.Tensor, value: torch.Tensor, sigma: torch.Tensor, even: torch.Tensor, op_limit: float
) -> tuple[float | None, float]:
    """The bias of an output and its limit. The bias is the slope of the line error = slope * value that fits
    all elements of even rows best, each weighted by 1 / sigma^2; None where there are too few rows.

    The limit is the op's and three standard errors of the slope, estimated from the scatter of the rows.
    Errors within a row are not independent, as they have common causes such as its rounded q.
    """
    sums = []
    for first in range(0, len(value), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        weighted = torch.where(sigma[rows] > 0, value[rows] / sigma[rows].double().square(), 0.0)
        sums.append(torch.stack([(weighted * error[rows]).sum(-1), (weighted * value[rows]).sum(-1)], -1))
    # Of each even row: sums of value * error / sigma^2, and of value^2 / sigma^2.
    by_error, by_value = torch.cat(sums)[even].unbind(-1)
    total = float(by_value.sum())
    if len(by_value) < FEWEST_ROWS or not total > 0:
        return None, op_limit
    slope = float(by_error.sum()) / total
    standard_error = float((by_error - slope * by_value).square().sum().sqrt()) / total
    return slope, op_limit + 3 * standard_error


def _largest(values: torch.Tensor) -> float:
    """The largest value; NaN counts as infinite."""
    return float(values.nan_to_num(nan=math.inf).max())
