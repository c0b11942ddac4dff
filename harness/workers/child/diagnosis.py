"""Diagnosis of a wrong output, in one sentence: where it is wrong (rows, heads, sequences, experts,
columns, as ranges) and what it is: zero, never written, NaN, the answer to other operands, the answer of
other rows, that of a known mistake of the op, a factor, or no pattern. It is computed for wrong outputs only,
in time linear in the size of the output; the work for known mistakes is limited."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.workers.child.outputs import POISON, bits
from kernels.mistakes import Answers, TooMuchWork, Work
from kernels.op import Reference, RowGroups, Tolerance

# The thresholds in this module only decide how an error is described, and never whether an output is wrong.
LONGEST = 220  # the most characters of a sentence
MOST_ROWS = 256  # how many wrong rows are looked at, spread evenly
MATCHED_ROWS, MATCHED_COLUMNS = 32, 512  # how many of them are compared with all right rows
MISTAKE_COLUMNS = 256  # known mistakes are computed for one index of dimension 0, in so many columns
MOST_NAMES = 3  # the most known mistakes that are named
FEWEST = 16  # how many elements are enough to tell rows apart, or a constant from chance
EXPLAINED = 0.02  # an output equals a mistake that leaves no more than this share of the squared error
MOST_RANGES = 4  # with more ranges than this only the number of indices is given
FEW_GROUPS = 3  # the most experts that are named
BLOCK = 16  # columns that are off and less than this apart belong to one range
DENSE = 0.3  # the least share of a range that is off
FULL = 0.95  # a box of which this share is wrong is called wrong as a whole


@dataclass(frozen=True)
class Layout:
    """How the output of a case is laid out, and what it may be confused with."""

    shape: tuple[int, ...]  # the shape of the whole output
    axes: tuple[str, ...] = ()  # what an index along each dimension counts; empty: rows and columns
    rows: Sequence[int] | None = None  # the indices along the first dimension that were compared; None: all
    groups: RowGroups | None = None  # what these rows belong to, by their index in the whole output
    others: Mapping[str, Reference] = field(default_factory=dict)
    """References to other operands, by what those are called; their sigma is that of the judged call."""
    answers: Callable[[list[int], slice], Answers] | None = None
    """What known mistakes of the op give for these rows and columns (`answers` in its module `mistakes`)."""

    def name(self, axis: int) -> str:
        """What an index along an axis counts."""
        if len(self.axes) == len(self.shape):
            return self.axes[axis]
        if axis == len(self.shape) - 1:
            return "column"
        return f"index {axis}" if axis else "row"

    def numbers(self, axis: int) -> list[int]:
        """The indices in the whole output of what was compared along an axis."""
        return list(self.rows) if axis == 0 and self.rows is not None else list(range(self.shape[axis]))


Diagnosis = tuple[str, dict[str, Any]]  # a sentence, and the same facts for the record


def of_not_finite(output: torch.Tensor, layout: Layout) -> Diagnosis:
    """The diagnosis of a whole output with elements that are NaN or infinite."""
    bad = ~torch.isfinite(output)
    count, nans, never = (int(each.sum()) for each in (bad, torch.isnan(output), bits(output) == POISON))
    spanned = math.prod(int(bad.transpose(0, axis).flatten(1).any(1).sum()) for axis in range(output.ndim))
    columns = bad.flatten(0, -2).any(0)
    where, facts = region_of(bad.any(-1), columns, replace(layout, rows=None), count / spanned)
    kinds = {
        "{} were never written": never,
        "NaN was computed in {}": nans - never,
        "{} are infinite": count - nans,
    }
    said = [kind.format(f"{n} of {output.numel()} outputs") for kind, n in kinds.items() if n]
    text = " and ".join(said) + (f", in {where}" if where else "")
    if never == count:
        return _short(text), {"kind": "not written", "where": facts}
    if nans > never and "head" in layout.axes:
        text += ": memory that no sequence may read holds NaN, so look at pages, lengths, masks "
        text += "and parts without a key"
    return _short(text), {"kind": "NaN" if nans else "infinite", "where": facts}


@dataclass(frozen=True)
class Wrong:
    """The wrong rows and columns of an output, or some of them where they are many."""

    got: torch.Tensor  # fp64 [rows, columns]: the output
    right: torch.Tensor  # like `got`: the right values
    sigma: torch.Tensor  # like `got`: the sigma that they were judged by
    rows: torch.Tensor  # which of the flattened compared rows these are
    columns: torch.Tensor  # which columns these are
    all_got: torch.Tensor  # [rows, columns]: the output of all compared rows, flattened
    all_right: torch.Tensor  # like `all_got`: the right values
    all_sigma: torch.Tensor  # like `all_got`: their sigma
    outer: tuple[int, ...]  # the shape of what was compared, without the columns
    tolerance: Tolerance
    layout: Layout


def selected(
    output: torch.Tensor,
    reference: Reference,
    sigma: torch.Tensor,
    wrong: torch.Tensor,
    columns: torch.Tensor,
    tolerance: Tolerance,
    layout: Layout,
) -> Wrong:
    """At most MOST_ROWS of the wrong rows, in some columns, bool [columns]. The others: see `of_errors`."""
    numbers, at = wrong.flatten().nonzero().flatten(), columns.nonzero().flatten()
    chosen = numbers[_spread(len(numbers), MOST_ROWS)]
    outputs, values, sigmas = flat = [t.flatten(0, -2) for t in (output, reference.value, sigma)]
    got, right, of_wrong = (t[chosen][:, at].double() for t in flat)
    outer = tuple(wrong.shape)
    return Wrong(got, right, of_wrong, chosen, at, outputs, values, sigmas, outer, tolerance, layout)


def of_errors(
    output: torch.Tensor,
    reference: Reference,
    sigma: torch.Tensor,
    z: torch.Tensor,
    wrong: torch.Tensor,
    tolerance: Tolerance,
    layout: Layout,
) -> Diagnosis:
    """The diagnosis of a finite output.

    output: the compared rows, in the shape of the reference
    sigma:  the standard deviation that the output was judged by, of the same shape
    z:      the error in units of sigma
    wrong:  bool, of that shape without the columns: which rows are off
    """
    flat = z.flatten(0, -2)
    numbers = wrong.flatten().nonzero().flatten()
    columns = wrong_columns(flat[numbers[_spread(len(numbers), 4096)]], tolerance)
    where, facts = region_of(wrong, columns, layout)
    these = selected(output, reference, sigma, wrong, columns, tolerance, layout)
    causes = (_constant, _answer_to_others, _other_rows, _mistake, _factor, _no_pattern)  # little work first
    kind, what, more = next(found for cause in causes if (found := cause(these)))
    worst = _worst(flat, these)
    sampled = "" if reference.rows is None else "sampled "
    place = f", in {where}" if where else ""
    sigmas = f", {worst['sigmas']:.3g} sigma" if worst["sigmas"] is not None else ""
    text = f"{int(wrong.sum())} of {wrong.numel()} {sampled}rows are off{place}: {what}"
    at_worst = f"; worst {worst['at']}: {worst['output']:.4g}, not {worst['reference']:.4g}{sigmas}"
    record = {"kind": kind, **more, "where": facts, "worst": worst}
    return _short(text, LONGEST - len(at_worst)) + at_worst, record


def _short(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def _spread(count: int, most: int) -> torch.Tensor:
    """At most `most` of the numbers 0 .. count - 1, both ends included."""
    if count <= most:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most).round().long()


def _worst(z: torch.Tensor, wrong: Wrong) -> dict[str, Any]:
    """The largest error in units of sigma, with its place in the whole output and both values. z: of all
    compared rows, [rows, columns]"""
    row, column = divmod(int(z.abs().nan_to_num(nan=math.inf).argmax()), z.shape[1])
    at = _index(row, wrong.outer)
    at[0] = wrong.layout.numbers(0)[at[0]]
    sigmas = float(z[row, column].abs())
    return {
        "at": [*at, column],
        "output": float(wrong.all_got[row, column]),
        "reference": float(wrong.all_right[row, column]),
        "sigmas": sigmas if math.isfinite(sigmas) else None,
    }


def _index(row: int, outer: tuple[int, ...]) -> list[int]:
    """The index of a flattened row along each dimension but the last."""
    return [int(i) for i in torch.unravel_index(torch.tensor(row), outer)]


# What the wrong elements look like: a name for the record, words, and facts for the record. Each function
# returns None where it does not apply.

Kind = tuple[str, str, dict[str, Any]]


def _constant(wrong: Wrong) -> Kind | None:
    got = wrong.got
    if bool((got == 0).all()) and bool((wrong.right != 0).any()):
        return "zero", "all zero", {}
    first = float(got[0, 0])
    if got.numel() >= FEWEST and bool((got == first).all()):
        return "not written", f"all {first:.3g}, as if never written", {"constant": first}
    return None


def _units(error: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """An error in units of sigma, of an exact value at most 1e6."""
    z = torch.where(error == 0, 0.0, error / sigma)
    return z.nan_to_num(nan=1e6, posinf=1e6, neginf=-1e6).clamp(-1e6, 1e6)


def _within(error: torch.Tensor, sigma: torch.Tensor, tolerance: Tolerance) -> bool:
    """Whether what is left of an error is explained by rounding."""
    left = _units(error, sigma)
    return (
        float(left.square().mean().sqrt()) <= tolerance.row
        and float(left.square().mean(1).sqrt().max()) <= 2 * tolerance.row
        and float(left.abs().max()) <= 2 * tolerance.element
    )


def _factor(wrong: Wrong) -> Kind | None:
    """One factor for all, found by least squares with each element weighted by its own sigma."""
    got, right, sigma = wrong.got, wrong.right, wrong.sigma
    weight = torch.where(sigma > 0, right / sigma.square(), 0.0)
    size = float((weight * right).sum())
    factor = float((weight * got).sum()) / size if size > 0 else math.nan
    # One element is a multiple of anything, and what is far smaller is another row rather than a multiple.
    if not math.isfinite(factor) or abs(factor) < 1e-3 or got.numel() < 4:
        return None
    if not _within(got - factor * right, abs(factor) * sigma, wrong.tolerance):
        return None
    what = "sign flipped" if abs(factor + 1) < 0.003 else f"{factor:.4g} times the reference"
    return "factor", what, {"factor": factor}


def _mistake(wrong: Wrong) -> Kind | None:
    """The known mistakes that the wrong rows equal as far as rounding tells, the nearest first."""
    if wrong.layout.answers is None or _within(wrong.got - wrong.right, wrong.sigma, wrong.tolerance):
        return None
    inner = math.prod(wrong.outer[1:])
    first = wrong.rows // inner
    index = int(first[0])
    of = wrong.rows[first == index]
    begin = int(wrong.columns[0]) // BLOCK * BLOCK
    across = slice(begin, min(begin + MISTAKE_COLUMNS, wrong.all_right.shape[1]))
    got, right, sigma = (t[of][:, across].double() for t in (wrong.all_got, wrong.all_right, wrong.all_sigma))
    if got.numel() < FEWEST:
        return None
    try:
        answers = wrong.layout.answers([wrong.layout.numbers(0)[index]], across)
    except (ImportError, AttributeError, MemoryError, RuntimeError):  # none are listed, or memory is short
        return None
    off, work = float(_units(got - right, sigma).square().mean()), Work()
    left = dict[str, float]()  # the mean square of what is left, in sigma
    for name, answer_of in answers.items():
        try:
            with work:
                answer = answer_of().to(wrong.all_got.dtype)
        except TooMuchWork:
            break
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
            continue  # these operands do not allow this mistake
        answer = answer.cpu().flatten(0, -2)[of % inner].double()
        # A larger output errs by more; 2^-9 is the error of rounding to bf16.
        larger = (answer.norm(dim=1) / right.norm(dim=1)).nan_to_num(1.0).clamp(1.0, 1e6)
        size = torch.hypot(sigma * larger[:, None], 2.0**-9 * answer)
        squares = float(_units(got - answer, size).square().mean())
        if _within(got - answer, size, wrong.tolerance) and squares <= EXPLAINED * off:
            left[name] = squares
    if not left:
        return None
    near = 1.5 * min(left.values()) + 0.1
    names = [name for name in sorted(left, key=left.__getitem__) if left[name] <= near][:MOST_NAMES]
    return "mistake", f"equals: {' or '.join(names)}", {"equals": names}


def _answer_to_others(wrong: Wrong) -> Kind | None:
    """Whether the rows hold the right answer to other operands."""
    inner = math.prod(wrong.outer[1:])
    own = torch.tensor(wrong.layout.numbers(0))[wrong.rows // inner]
    for name, other in wrong.layout.others.items():
        if other.value.shape[1:-1] != wrong.outer[1:] or other.value.shape[-1] != wrong.all_right.shape[-1]:
            continue
        # The other reference may be of other rows than the ones that are wrong.
        rows = range(len(other.value)) if other.rows is None else other.rows
        place = {row: i for i, row in enumerate(rows)}
        at = torch.tensor([place.get(row, -1) for row in own.tolist()])
        known = at >= 0
        at = at[known] * inner + wrong.rows[known] % inner
        answer, sigma = (
            t.reshape(-1, wrong.all_right.shape[-1])[at][:, wrong.columns].double()
            for t in (other.value, other.sigma)
        )
        # It shows nothing if it covers less than half of the rows, or if both references are equal there.
        if int(known.sum()) * 2 < len(known) or torch.equal(answer, wrong.right[known]):
            continue
        if _within(wrong.got[known] - answer, sigma, wrong.tolerance):
            return "stale", f"it is the answer to {name}", {"answer_to": name}
    return None


def _other_rows(wrong: Wrong) -> Kind | None:
    """Whether wrong rows hold the right answers of other rows; some are compared with all right rows."""
    if len(wrong.columns) < FEWEST:
        return None
    some = _spread(len(wrong.rows), MATCHED_ROWS)
    few = _spread(len(wrong.columns), MATCHED_COLUMNS)
    candidates = wrong.all_right[:, wrong.columns[few]].float()
    # In units of each column's size, so that a few large columns do not decide alone.
    size = candidates.square().mean(0).sqrt().clamp(min=1e-30)
    candidates /= size
    sought = wrong.got[some][:, few].float() / size
    match = (candidates.square().sum(1) - 2 * sought @ candidates.T).argmin(1)
    right, sigma = (t[match][:, wrong.columns].double() for t in (wrong.all_right, wrong.all_sigma))
    left = _units(wrong.got[some] - right, sigma).square().mean(1).sqrt()
    found = (left <= 1.5 * wrong.tolerance.row) & (match != wrong.rows[some])
    if float(found.double().mean()) < 0.9:
        return None

    moves = [
        (_index(here, wrong.outer), _index(there, wrong.outer))
        for here, there in zip(wrong.rows[some][found].tolist(), match[found].tolist(), strict=True)
    ]
    numbers = wrong.layout.numbers(0)
    for index in itertools.chain(*moves):
        index[0] = numbers[index[0]]
    axes = [axis for axis in range(len(wrong.outer)) if any(h[axis] != t[axis] for h, t in moves)]
    name = "row"
    pairs: dict[object, object] = {str(here): there for here, there in moves}
    if len(axes) == 1:  # in words of the one axis along which the rows moved
        name = wrong.layout.name(axes[0])
        pairs = {here[axes[0]]: there[axes[0]] for here, there in moves}
    told = ", ".join(f"{here} that of {there}" for here, there in list(pairs.items())[:2])
    more = " ..." if len(pairs) > 2 else ""
    return "moved", f"{name}s hold the answers of other {name}s: {told}{more}", {"from": moves[:64]}


def _no_pattern(wrong: Wrong) -> Kind:
    got, right = wrong.got, wrong.right
    error, size = float((got - right).norm()), float(right.norm())
    share = error / size if size else math.inf
    sizes = float(got.norm()) * size
    correlation = float((got * right).sum()) / sizes if sizes else math.nan
    facts = {"relative": share if math.isfinite(share) else None}
    if got.numel() < FEWEST or not math.isfinite(correlation):
        return "none", f"off by {_percent(share)} of the value", facts
    text = f"no pattern, off by {_percent(share)}; correlation with the reference {correlation:.3g}"
    return "none", text, facts | {"correlation": correlation}


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


# Where the wrong elements are


def region_of(
    rows: torch.Tensor, columns: torch.Tensor, layout: Layout, share: float | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """The region in words, empty where all that was compared is wrong, and for the record: of each axis
    that is not wrong as a whole, its ranges with both ends.

    rows:    bool, of the output's shape without the columns: which of the compared rows are wrong
    columns: bool [columns]: which columns are wrong in any of them
    share:   how much of the box that these span is wrong; None: what the rows say
    """
    axes = [*range(rows.ndim), len(layout.shape) - 1]
    hit = [rows.transpose(0, axis).flatten(1).any(1) if rows.ndim > 1 else rows for axis in range(rows.ndim)]
    wrong = [[int(i) for i in h.nonzero().flatten()] for h in (*hit, columns)]
    if share is None:
        share = int(rows.sum()) / max(math.prod(len(indices) for indices in wrong[:-1]), 1)
    words, facts = [], []
    for axis, indices in zip(axes, wrong, strict=True):
        size = len(columns) if axis == axes[-1] else rows.shape[axis]
        numbers, name = layout.numbers(axis), layout.name(axis)
        if len(indices) < size:
            grouped = _grouped(indices, layout.groups, layout) if axis == 0 and layout.groups else ""
            words.append(grouped or in_words(name, indices, numbers))
            ranges = [[numbers[first], numbers[last]] for first, last in runs(indices)]
            facts.append({"axis": name, "ranges": ranges[:64], "count": len(indices), "of": size})
    text = ", ".join(words)
    if share < FULL:
        text = f"parts of {text}" if text else "parts of all"
    return text, facts


def runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last of each series of consecutive numbers, ascending."""
    found = []
    for _, group in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        found.append((members[0], members[-1]))
    return found


def in_words(name: str, indices: Sequence[int], numbers: Sequence[int]) -> str:
    """Indices along an axis in words: `heads 8..15`, `columns 3 and 7`.

    numbers: the number of each index of the whole axis
    """
    if len(indices) == 1:
        return f"{name} {numbers[indices[0]]}"
    ends = [(numbers[first], numbers[last]) for first, last in runs(indices)]
    if len(ends) > MOST_RANGES:
        return f"{len(indices)} of {name}s {ends[0][0]}..{ends[-1][1]}"
    *most, last = [str(first) if first == last else f"{first}..{last}" for first, last in ends]
    return f"{name}s {', '.join(most)} and {last}" if most else f"{name}s {last}"


def _grouped(indices: Sequence[int], groups: RowGroups, layout: Layout) -> str:
    """Wrong rows in terms of their sequences or experts; empty where that says no more than their numbers."""
    numbers, axis, name = layout.numbers(0), layout.name(0), groups.name
    members: dict[int, list[int]] = {}
    for row, of in enumerate(groups.of.tolist()):
        for group in of:
            members.setdefault(group, []).append(row)
    compared, wrong = set(numbers), {numbers[index] for index in indices}
    touched = sorted(group for group, rows in members.items() if group >= 0 and wrong & {*rows})
    whole = [group for group in touched if compared & {*members[group]} <= wrong]
    if groups.of.shape[1] > 1:  # a row has several experts
        several = [group for group in whole if len(compared & {*members[group]}) > 1]
        covered = compared & {row for group in several for row in members[group]}
        if len(several) > FEW_GROUPS or wrong != covered:
            return ""
        return f"the {len(wrong)} {axis}s of {in_words(name, several, range(max(members) + 1))}"
    every = len(touched) == len(members)
    which = f"all {name}s" if every else in_words(name, touched, range(len(members)))
    if whole == touched:
        return which
    inside = [[place for place, row in enumerate(members[group]) if row in wrong] for group in touched]
    lengths = [len(members[group]) for group in touched]
    if layout.rows is None and all(places == inside[0] for places in inside):
        return f"{in_words(axis, inside[0], range(max(lengths)))} of {f'each {name}' if every else which}"
    if layout.rows is None and inside == [[length - 1] for length in lengths]:
        return f"the last {axis} of {which}"
    return f"{len(indices)} {axis}s of {which}"


def wrong_columns(z: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Which columns are off, bool [columns].

    z: [rows, columns], the error of the wrong rows in units of sigma

    The errors of right values have a root mean square near 1, which varies less over more rows. Some columns
    of a wrong range are near the right value by chance, so that a range counts as a whole where enough of its
    columns are off.
    """
    count, size = z.shape
    z = z.abs().nan_to_num(nan=1e6, posinf=1e6).clamp(max=1e6)
    off = (z.amax(0) > tolerance.element) | (z.square().mean(0).sqrt() > 1.2 + 2.8 / count**0.5)
    found = off.nonzero().flatten().tolist()
    ranges: list[list[int]] = []
    for column in found:
        if ranges and column - ranges[-1][-1] < BLOCK:
            ranges[-1].append(column)
        else:
            ranges.append([column])
    for columns in ranges:
        begin, stop = columns[0], columns[-1] + 1
        if len(columns) < DENSE * (stop - begin):
            continue
        if len(columns) >= BLOCK:  # the columns at its ends, too
            begin -= begin % BLOCK if begin % BLOCK <= 2 else 0
            stop += -stop % BLOCK if -stop % BLOCK <= 2 else 0
        off[begin:stop] = True
    if not found:  # errors near the limits: the segments that exceed theirs
        segments = z.split(tolerance.segment or size, 1)
        over = [bool((each.square().mean(1).sqrt() > tolerance.row).any()) for each in segments]
        off = torch.cat([torch.full((each.shape[1],), it) for each, it in zip(segments, over, strict=True)])
    if count < 8 and float(off.double().mean()) > 0.9:  # the rest is right by chance
        return torch.ones_like(off)
    return off
