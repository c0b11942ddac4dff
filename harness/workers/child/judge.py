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
from harness.plan.memory import MAX_FLOPS, kept_references
from harness.workers.child.device import OnDevice, empty_cache
from harness.workers.child.diagnosis import Layout, of_errors, of_not_finite
from harness.workers.child.outputs import Blob
from kernels.mistakes import Answers
from kernels.op import Reference, Tolerance
from kernels.operands import Operands, Seeds
from kernels.platform import available_memory
from shapes.case import Case

CHEAP = 0.005  # a reference that takes less than this share of the work that it may take is never sampled

COMPARING = 96  # bytes for comparing an element: 3 numbers of the reference, 6 of `compare_output`, and room

HOST_SHARE = 0.5  # the share of the host's free memory that the references of a GPU's case may take
FEW_ROWS = 8  # from fewer rows than this the scatter of their bias cannot be estimated

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
class Known:
    """A reference, and what is known of the case that it is of."""

    reference: Reference
    tolerance: Tolerance
    layout: Layout
    operands: dict[str, Any]  # what makes the same operands again: op, sizes, boundary, seeds
    make: Callable[[], Operands]  # makes them
    nbytes: int  # the bytes of them


class Judge(OnDevice):
    """Each public method is one request of the parent process."""

    def __init__(self) -> None:
        self.references: dict[str, Known] = {}
        # The first wrong output, or the last one that was judged, for `save`: the name of its reference, the
        # tensors by the names of their files, and the report.
        self.kept: tuple[str, dict[str, torch.Tensor], dict[str, Any]] | None = None

    def hello(self, kind: str, device: str, *given: Any, **named: Any) -> dict[str, Any]:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        ready = super().hello(kind, device, *given, **named)
        if kind != "cpu":
            # The first product allocates a workspace that stays. Amid a case's memory it would keep that from
            # being given back.
            matrix = torch.zeros(16, 16, device=device)
            matrix @ matrix
        return ready

    def reference(self, name: str, case: Case, seeds: Mapping[str, Any], share: float = 1.0) -> int:
        """Computes a reference and keeps it under a name. Returns the digest of its operands.

        share: the share of the work of a whole reference that this one may take, by computing a sample of
               the rows; a CHEAP reference is whole
        """
        op = kernels.OPS[case.op]
        sizes = op.sizes(case.sizes)
        make = partial(op.make, sizes, Seeds(**seeds), self.device, case.boundary)
        operands = make()
        most = MAX_FLOPS[self.kind]
        whole = min(most, op.work(sizes, case.boundary).flops)
        if share < 1:
            most = max(CHEAP * most, share * whole)
        if self.kind != "cpu":  # on a CPU the plan of memory counts the references
            fitting = HOST_SHARE * available_memory() / kept_references(op, sizes, self.kind)
            if fitting < 1:
                most = min(most, fitting * whole)
        reference = _moved(op.reference(operands, most, random.SystemRandom().random()), "cpu")
        shape = tuple(op.empty_output(sizes, "meta").shape)
        layout = Layout(shape, tuple(op.axes), reference.rows, op.row_groups(operands))
        all_seeds = asdict(Seeds(**seeds))
        made_by = {"op": case.op, "sizes": dict(case.sizes), "boundary": case.boundary, "seeds": all_seeds}
        nbytes = sum(tensor.nbytes for tensor in operands.tensors().values())
        self.references[name] = Known(reference, op.tolerance(sizes), layout, made_by, make, nbytes)
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
        """The report on an output that a worker packed. It is compared on the device where that has room,
        because a large output takes the host many seconds; a wrong one again on the host, for a
        diagnosis."""
        known = self.references[name]
        reference = known.reference
        wanted = known.layout.shape
        if [n for n in shape if n > 1] == [n for n in wanted if n > 1]:
            shape = wanted  # axes of length 1, as that of one query token, may be left out
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
            report = compare_output(tensor, reference, known.tolerance, wanted, fp8, truncates, layout)
            empty_cache(self.kind)
        if self.kept is None or self.kept[2]["ok"]:
            sigma = sigma_of(reference, fp8, truncates)
            tensors = {"output": tensor, "reference": reference.value, "sigma": sigma}
            self.kept = (name, tensors, report)
        return report

    def _compare_on_gpu(
        self, output: torch.Tensor, known: Known, fp8: bool, truncates: bool
    ) -> dict[str, Any] | None:
        """The report on an output by the GPU; None where there is no GPU with enough memory."""
        if self.kind == "cpu":
            return None
        needed = 2 * output.nbytes + COMPARING * known.reference.value.numel()
        if needed >= torch.cuda.mem_get_info(self.device)[0]:
            return None
        try:
            moved = _moved(known.reference, self.device)
            output = output.to(self.device)
            return compare_output(output, moved, known.tolerance, known.layout.shape, fp8, truncates)
        except torch.OutOfMemoryError:  # other processes may have taken the memory meanwhile
            return None

    def _others(self, name: str, fp8: bool, truncates: bool) -> dict[str, Reference]:
        """The references to other operands in the same boundary, by what those operands are called."""
        operands, _, boundary = name.partition(" ")
        others = {}
        for key, known in self.references.items():
            other_operands, _, other_boundary = key.partition(" ")
            if other_boundary == boundary and other_operands != operands:
                called = OPERANDS.get(other_operands, f"the {other_operands} operands")
                sigma = sigma_of(known.reference, fp8, truncates)
                others[called] = replace(known.reference, sigma=sigma)
        return others

    def _answers(self, known: Known, rows: list[int], columns: slice) -> Answers:
        """What known mistakes give on the operands of a reference, which are made again."""
        if available_memory() < 3 * known.nbytes:
            raise MemoryError
        mistakes = importlib.import_module(f"kernels.{known.operands['op']}.mistakes")
        answers: Answers = mistakes.answers(known.make(), rows, columns)
        return answers

    def save(self, folder: str) -> dict[str, Any]:
        """Writes `output.pt`, the whole output, and `reference.pt` and `sigma.pt` of the compared rows.
        Returns which operands these are, the compared rows (None: all), and the report; an empty dict if
        nothing was judged."""
        if self.kept is None:
            return {}
        name, tensors, report = self.kept
        for file, tensor in tensors.items():
            torch.save(tensor.contiguous(), Path(folder) / f"{file}.pt")
        known = self.references[name]
        return known.operands | {"rows": known.reference.rows, "report": report}


def _moved(reference: Reference, device: str) -> Reference:
    moved: dict[str, Any] = {}
    for name, value in vars(reference).items():
        moved[name] = value.to(device) if isinstance(value, torch.Tensor) else value
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
    """Compares an output with its reference. Returns a plain dict for the record.

    Each element must be finite, also outside the sampled rows. An error is measured in units of
    `reference.sigma`, or of `reference.sigma_fp8` for a call that rounds activations to FP8 itself. A row
    is the last dimension, or a segment of it. Truncating to bf16 errs twice as much as rounding to nearest
    (root mean squares of 1/sqrt(3) and 1/sqrt(12) units in the last place), so each rounding of a
    truncating call counts four times in the variance.

    ok, reason:     whether the output is right, and why not
    row_error, element_error: the worst ones, in sigma, with their limits; None if not finite
    bias:           the share by which the whole output is too large (see `_bias`), with its limit
    noise:          the error of all rows of `reference.even` together, in sigma, with its limit; of FP8
                    calls only
    relative_error: |output - reference| / |reference| over all elements, for people
    rows, of_rows:  how many rows were compared, of how many
    diagnosis:      of a wrong output, the facts in its reason (see diagnosis.py)

    shape:     that the output must have; None: that of the reference
    fp8:       whether the call rounds activations to FP8 itself
    truncates: whether the call truncates to bf16
    layout:    how the output is laid out, for the diagnosis; None: in rows and columns
    """
    wanted = shape or tuple(reference.value.shape)
    if tuple(output.shape) != wanted:
        reason = f"output has shape {tuple(output.shape)}, not {wanted}"
        limits = {"row_limit": tolerance.row, "element_limit": tolerance.element}
        return {"ok": False, "reason": reason, "row_error": None, "element_error": None, **limits}
    sampled = output if reference.rows is None else output[reference.rows]
    error = sampled.double() - reference.value
    sigma = sigma_of(reference, fp8, truncates)
    # Where sigma is 0 the right value is exact, and any error is too large.
    z = torch.where(error == 0, 0.0, error / sigma)
    of_segments = [part.square().mean(-1).sqrt() for part in z.split(tolerance.segment or z.shape[-1], -1)]
    row_error = torch.stack(of_segments, -1).amax(-1)
    relative = float(error.norm()) / (float(reference.value.norm()) or 1.0)
    report: dict[str, Any] = {
        "ok": False,
        "reason": "",
        "row_error": _finite(_largest(row_error)),
        "row_limit": tolerance.row,
        "element_error": _finite(_largest(z.abs())),
        "element_limit": tolerance.element,
        "bias": None,
        "bias_limit": None,
        "noise": None,
        "noise_limit": None,
        "relative_error": _finite(relative),
        "rows": row_error.numel(),
        "of_rows": output.numel() // output.shape[-1],
    }
    rows_over = ~(row_error <= tolerance.row) | ~(z.abs().amax(-1) <= tolerance.element)
    is_finite = bool(torch.isfinite(output).all())
    if not is_finite or bool(rows_over.any()):
        layout = layout or Layout(wanted, rows=reference.rows)
        try:
            if is_finite:
                found = of_errors(sampled, reference, sigma, z, rows_over, tolerance, layout)
            else:
                found = of_not_finite(output, layout)
            report["reason"], report["diagnosis"] = found
        except Exception as failure:  # that the output is wrong does not depend on the diagnosis
            off = f"{int(rows_over.sum())} of {row_error.numel()} rows are off"
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
    """The bias and the noise of an output of which each row is right, their limits, and the reason where one
    is beyond its limit."""
    in_fp8 = fp8 and reference.sigma_fp8 is not None
    even = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device)
    if in_fp8 and reference.even is not None:
        even = reference.even
    allowed = tolerance.bias if in_fp8 or truncates else tolerance.bias_bf16
    bias, limit = _bias(error, reference.value, sigma, even, allowed)
    noise = None
    if in_fp8 and int(even.sum()) >= FEW_ROWS:
        noise = float(z[even].square().mean().sqrt())
    noise_limit = tolerance.noise if in_fp8 else None
    reason = ""
    if bias is not None and abs(bias) > limit:
        size = "large" if bias > 0 else "small"
        reason = f"the whole output is {abs(bias):.1%} too {size} (limit {limit:.1%})"
    elif noise is not None and noise_limit is not None and noise > noise_limit:
        reason = (
            f"the whole output errs by {noise:.3g} sigma in root mean square (limit {noise_limit:g}), "
            "as if rounded to a format of fewer bits"
        )
    return {"reason": reason, "bias": bias, "bias_limit": limit, "noise": noise, "noise_limit": noise_limit}


def sigma_of(reference: Reference, fp8: bool, truncates: bool) -> torch.Tensor:
    """The sigma that an output is judged by: of calls that round activations to FP8, or that truncate."""
    sigma = reference.sigma
    if fp8 and reference.sigma_fp8 is not None:
        sigma = reference.sigma_fp8
    if truncates:
        sigma = (sigma.square() + 3 * reference.sigma.square()).sqrt()
    return sigma


def _bias(
    error: torch.Tensor, value: torch.Tensor, sigma: torch.Tensor, even: torch.Tensor, limit: float
) -> tuple[float | None, float]:
    """The slope of the error over the reference, over all elements of even rows, weighted by 1/sigma^2;
    None where there are too few rows. And its limit: the op's limit and three standard errors, estimated
    from the scatter of the rows. The errors of a row have common causes, such as its rounded q, so that the
    rows are the sample."""
    sums = []
    for first in range(0, len(value), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        weight = torch.where(sigma[rows] > 0, value[rows] / sigma[rows].double().square(), 0.0)
        shared = (weight * error[rows]).sum(-1)
        size = (weight * value[rows]).sum(-1)
        sums.append(torch.stack([shared, size], -1))
    shared, size = torch.cat(sums)[even].unbind(-1)
    total = float(size.sum())
    if len(size) < FEW_ROWS or not total > 0:
        return None, limit
    slope = float(shared.sum()) / total
    scatter = float((shared - slope * size).square().sum().sqrt()) / total
    return slope, limit + 3 * scatter


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _largest(values: torch.Tensor) -> float:
    """The largest value; NaN counts as infinite."""
    return float(values.nan_to_num(nan=float("inf")).max())
