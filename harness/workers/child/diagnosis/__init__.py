"""Diagnosis of a wrong output: where it is wrong and how that looks, in the words of an engineer. Computed of
wrong outputs only, in time linear in the output's size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.workers.child.diagnosis.kind import MOST_ROWS, Answer, Errors, Kind, kind_of, spread
from harness.workers.child.diagnosis.region import Layout, Region, region_of, wrong_columns

if TYPE_CHECKING:
    import torch

    from kernels.op import Reference, Tolerance

__all__ = ["Context", "Diagnosis", "Layout", "of_errors", "of_not_finite"]

COLUMN_ROWS = 4096
"""Wrong rows that tell which columns are."""
LONGEST = 220
"""Characters of a sentence."""


@dataclass(frozen=True)
class Context:
    """What is known of an output beside its reference.

    layout: of the output
    sums:   whether its elements are sums of independent terms (see `Op.sums`)
    others: references to other operands, by what those are called; their sigma is what calls are judged by
    """

    layout: Layout
    sums: bool = False
    others: Mapping[str, Reference] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """text: a sentence; facts: the same for the record"""

    text: str
    facts: dict[str, Any]


def of_not_finite(output: torch.Tensor, context: Context) -> Diagnosis:
    """Of an output with elements that are NaN or infinite."""
    import torch

    bad = ~torch.isfinite(output)
    rows = bad.any(-1)
    columns = bad.flatten(0, -2).any(0)
    spanned = math.prod(int(bad.transpose(0, axis).flatten(1).any(1).sum()) for axis in range(output.ndim))
    whole = replace(context.layout, rows=None)
    region = region_of(rows, columns, whole, int(bad.sum()) / max(spanned, 1))
    nans = int(torch.isnan(output).sum())
    if nans == int(bad.sum()):
        what = "NaN (never written, or computed from NaN)"
    elif nans:
        what = f"NaN or infinite ({nans} are NaN)"
    else:
        what = "infinite"
    where = f", in {region.text}" if region.text else ""
    text = f"{int(bad.sum())} of {output.numel()} outputs are {what}{where}"
    kind = "NaN" if nans else "infinite"
    return Diagnosis(_short(text), {"kind": kind, "where": region.facts})


def of_errors(
    output: torch.Tensor,
    reference: Reference,
    sigma: torch.Tensor,
    z: torch.Tensor,
    wrong: torch.Tensor,
    tolerance: Tolerance,
    context: Context,
) -> Diagnosis:
    """Of a finite output.

    output: the compared rows, in the shape of the reference; sigma: what it was judged by; z: its error
            in units of that
    wrong:  bool, of that shape without the columns: the rows that are off
    """
    width = output.shape[-1]
    got, value, scale, z = (t.reshape(-1, width) for t in (output, reference.value, sigma, z))
    numbers = wrong.flatten().nonzero().flatten()
    columns = wrong_columns(z[numbers[spread(len(numbers), COLUMN_ROWS)]], tolerance)
    region = region_of(wrong, columns, context.layout)
    chosen = numbers[spread(len(numbers), MOST_ROWS)]
    errors = Errors(
        got=got,
        value=value,
        sigma=scale,
        wrong=chosen,
        columns=columns.nonzero().flatten(),
        outer=tuple(wrong.shape),
        layout=context.layout,
        tolerance=tolerance,
        sums=context.sums,
    )
    kind = kind_of(errors, _answers(context, reference, chosen))
    worst = _worst(z, tuple(wrong.shape), got, value, context.layout)
    sampled = "" if reference.rows is None else "sampled "
    text = _sentence(f"{int(wrong.sum())} of {wrong.numel()} {sampled}rows are off", region, kind, worst)
    facts = {"kind": kind.name, **kind.facts, "where": region.facts, "worst": worst}
    return Diagnosis(text, facts)


def _worst(
    z: torch.Tensor, outer: tuple[int, ...], got: torch.Tensor, value: torch.Tensor, layout: Layout
) -> dict[str, Any]:
    """The largest difference in units of sigma, with its place in the whole output and both values."""
    import torch

    flat = int(z.abs().nan_to_num(nan=math.inf).argmax())
    row, column = divmod(flat, z.shape[1])
    at = [int(i) for i in torch.unravel_index(torch.tensor(row), outer)]
    at[0] = layout.numbers(0)[at[0]]
    sigmas = float(z.flatten()[flat].abs())
    return {
        "at": [*at, column],
        "output": float(got[row, column]),
        "reference": float(value[row, column]),
        "sigmas": sigmas if math.isfinite(sigmas) else None,
    }


def _sentence(begin: str, region: Region, kind: Kind, worst: dict[str, Any]) -> str:
    where = f", in {region.text}" if region.text else ""
    sigmas = f", {worst['sigmas']:.3g} sigma" if worst["sigmas"] is not None else ""
    values = f"{worst['output']:.4g}, not {worst['reference']:.4g}{sigmas}"
    return _short(f"{begin}{where}: {kind.text}; worst {worst['at']}: {values}")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def _answers(context: Context, reference: Reference, chosen: torch.Tensor) -> dict[str, Answer]:
    """The right answers to other operands in these rows, NaN where the other has none."""
    import torch

    width, own = reference.value.shape[-1], context.layout.numbers(0)
    inner = math.prod(reference.value.shape[1:-1])
    answers: dict[str, Answer] = {}
    for name, other in context.others.items():
        if other.value.shape[1:] != reference.value.shape[1:]:
            continue
        rows = list(range(len(other.value))) if other.rows is None else other.rows
        place = {row: i for i, row in enumerate(rows)}
        known = torch.tensor([place.get(row, -1) for row in own])[chosen // inner]
        at = known.clamp(min=0) * inner + chosen % inner
        value, sigma = (t.reshape(-1, width)[at].double() for t in (other.value, other.sigma))
        value[known < 0] = torch.nan
        answers[name] = value, sigma
    return answers
