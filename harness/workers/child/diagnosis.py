"""The diagnosis of a wrong output, in one sentence: where it is wrong and how.

Where: rows, heads, sequences, experts and columns, as ranges. How: zero, never written, NaN, the answer to
other operands, the answers of other rows, the answer that a known mistake gives, a factor, or no pattern.
Work and memory are linear in the size of the output; the work for known mistakes is limited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from harness.files import finite
from harness.machine.cpu_threads import runs_of
from harness.workers.child.outputs import POISON, bits
from kernels.mistakes import Answers, TooMuchWork, Work
from kernels.op import Reference, RowGroups, Tolerance

# The thresholds in this module only decide how an error is described, and never whether an output is wrong.
LONGEST = 220  # the most characters of a sentence
MOST_ROWS = 256  # the most wrong rows that are examined, spread evenly over all
MATCHED_ROWS, MATCHED_COLUMNS = 32, 512  # of the wrong ones, the most that are compared with all right rows
MISTAKE_COLUMNS = 256  # known mistakes are computed for one index of dimension 0, in so many columns
MOST_NAMES = 3  # the most known mistakes that are named
FEWEST = 16  # elements that are enough to tell rows apart, or a constant from chance
EXPLAINED = 0.02  # an output equals a mistake that leaves no more than this share of the squared error
MOST_RANGES = 4  # with more ranges than this only the number of indices is given
MOST_EXPERTS = 3  # the most experts that are named
BLOCK = 16  # columns that are off and less than this apart belong to one range
DENSE = 0.3  # a range counts as a whole if at least this share of its columns is off
FULL = 0.95  # a region of which less than this share is wrong is called `parts of` it


@dataclass(frozen=True)
class Layout:
    """How the output of a case is laid out, and what it may be confused with."""

    shape: tuple[int, ...]  # the shape of the whole output
    axes: tuple[str, ...] = ()  # what an index along each dimension counts; empty: rows and columns
    rows: Sequence[int] | None = None  # the indices along the first dimension that were compared; None: all
    groups: RowGroups | None = None  # the sequence or experts of each row of the whole output
    others: Mapping[str, Reference] = field(default_factory=dict)
    """References to other operands, by what these are called; their sigma is that of the judged call."""
    answers: Callable[[list[int], slice], Answers] | None = None
    """What known mistakes of the op give for these rows and columns (`answers` in its module `mistakes`)."""

    def name(self, axis: int) -> str:
        """What an index along an axis counts, such as `head`."""
        if len(self.axes) == len(self.shape):
            return self.axes[axis]
        if axis == len(self.shape) - 1:
            return "column"
        return f"index {axis}" if axis else "row"

    def numbers(self, axis: int) -> list[int]:
        """The indices along an axis that were compared, as they are in the whole output."""
        if axis == 0 and self.rows is not None:
            return list(self.rows)
        return list(range(self.shape[axis]))


Diagnosis = tuple[str, dict[str, Any]]  # a sentence, and the same facts for the record


def of_not_finite(output: torch.Tensor, layout: Layout) -> Diagnosis:
    """The diagnosis of a whole output with elements that are NaN or infinite."""
    bad = ~torch.isfinite(output)
    bad_count = int(bad.sum())
    nan_count = int(torch.isnan(output).sum())
    unwritten_count = int((bits(output) == POISON).sum())
    # How many indices of each dimension have a bad element, and the share of the elements there that are bad.
    counts = [int(bad.transpose(0, axis).flatten(1).any(1).sum()) for axis in range(output.ndim)]
    share = bad_count / math.prod(counts)
    where, facts = region_of(bad.any(-1), bad.flatten(0, -2).any(0), replace(layout, rows=None), share)
    kinds = [
        ("{} were never written", unwritten_count),
        ("NaN was computed in {}", nan_count - unwritten_count),
        ("{} are infinite", bad_count - nan_count),
    ]
    parts = [kind.format(f"{count} of {output.numel()} outputs") for kind, count in kinds if count]
    text = " and ".join(parts) + (f", in {where}" if where else "")
    if unwritten_count == bad_count:
        return _short(text), {"kind": "not written", "where": facts}
    if nan_count > unwritten_count and "head" in layout.axes:
        look_at = "pages, lengths, masks and parts without a key"
        text += f": memory that no sequence may read holds NaN, so look at {look_at}"
    return _short(text), {"kind": "NaN" if nan_count else "infinite", "where": facts}


@dataclass
class Wrong:
    """The compared rows of an output, and which rows and columns of it are wrong, or some of these where they
    are many. Rows are flattened: all dimensions of the output but the last one, which has the columns."""

    all_got: torch.Tensor  # [compared rows, columns]: the output
    all_right: torch.Tensor  # like `all_got`: the right values
    all_sigma: torch.Tensor  # like `all_got`: the sigma that they were judged by
    rows: torch.Tensor  # int64 [wrong rows]: their indices among all compared rows
    columns: torch.Tensor  # int64 [wrong columns]: their indices among all columns
    outer: tuple[int, ...]  # the shape of the compared rows before they were flattened
    tolerance: Tolerance
    layout: Layout

    def __post_init__(self) -> None:
        self.got, self.right, self.sigma = self.elements(self.rows, self.columns)

    def elements(
        self, rows: torch.Tensor, columns: torch.Tensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output, the right values and their sigma in these rows and columns, in fp64."""
        whole = (self.all_got, self.all_right, self.all_sigma)
        got, right, sigma = (_elements(tensor, rows, columns) for tensor in whole)
        return got, right, sigma

    @property
    def inner_rows(self) -> int:
        """How many flattened rows an index of the first dimension has."""
        return math.prod(self.outer[1:])

    def index_of(self, row: int) -> list[int]:
        """The index of a flattened row in the whole output, along each dimension but the last."""
        first, *others = (int(i) for i in torch.unravel_index(torch.tensor(row), self.outer))
        return [self.layout.numbers(0)[first], *others]


def _elements(tensor: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor | slice) -> torch.Tensor:
    """The elements of a tensor [rows, columns] in these rows and columns, in fp64."""
    return tensor[rows][:, columns].double()


def of_errors(
    output: torch.Tensor,
    reference: Reference,
    sigma: torch.Tensor,
    z: torch.Tensor,
    are_wrong: torch.Tensor,
    tolerance: Tolerance,
    layout: Layout,
) -> Diagnosis:
    """The diagnosis of a finite output.

    output:    the compared rows, in the shape of the reference
    sigma:     the standard deviation that the output was judged by, of the same shape
    z:         the error in units of sigma
    are_wrong: bool, of that shape without the columns: which rows are wrong
    """
    flat_z = z.flatten(0, -2)
    rows = are_wrong.flatten().nonzero().flatten()
    columns = wrong_columns(flat_z[rows[_spread(len(rows), 4096)]], tolerance)
    where, facts = region_of(are_wrong, columns, layout)
    wrong = Wrong(
        all_got=output.flatten(0, -2),
        all_right=reference.value.flatten(0, -2),
        all_sigma=sigma.flatten(0, -2),
        rows=rows[_spread(len(rows), MOST_ROWS)],
        columns=columns.nonzero().flatten(),
        outer=tuple(are_wrong.shape),
        tolerance=tolerance,
        layout=layout,
    )
    cause, worst = _cause(wrong), _worst(flat_z, wrong)
    sampled = "" if reference.rows is None else "sampled "
    place = f", in {where}" if where else ""
    sigmas = f", {worst['sigmas']:.3g} sigma" if worst["sigmas"] is not None else ""
    text = f"{len(rows)} of {are_wrong.numel()} {sampled}rows are off{place}: {cause.text}"
    at_worst = f"; worst {worst['at']}: {worst['output']:.4g}, not {worst['reference']:.4g}{sigmas}"
    record = {"kind": cause.kind, **cause.facts, "where": facts, "worst": worst}
    return _short(text, LONGEST - len(at_worst)) + at_worst, record


def _short(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def _spread(count: int, most: int) -> torch.Tensor:
    """At most `most` of the numbers 0 .. count - 1, both ends included."""
    if count <= most:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most).round().long()


def _worst(z: torch.Tensor, wrong: Wrong) -> dict[str, Any]:
    """The largest error in sigma, with its place in the whole output and both values. z: [rows, columns]"""
    row, column = divmod(int(z.abs().nan_to_num(nan=math.inf).argmax()), z.shape[1])
    sigmas = float(z[row, column].abs())
    return {
        "at": [*wrong.index_of(row), column],
        "output": float(wrong.all_got[row, column]),
        "reference": float(wrong.all_right[row, column]),
        "sigmas": finite(sigmas),
    }


# How the wrong elements are wrong. Each function returns None where it does not apply.


class Cause(NamedTuple):
    kind: str  # for the record
    text: str  # for the sentence
    facts: dict[str, Any]  # for the record


def _cause(wrong: Wrong) -> Cause:
    """The first cause that applies; those that take little work come first."""
    for find in (_constant, _answer_to_others, _other_rows, _mistake, _factor):
        cause = find(wrong)
        if cause is not None:
            return cause
    return _no_pattern(wrong)


def _constant(wrong: Wrong) -> Cause | None:
    got = wrong.got
    if bool((got == 0).all()) and bool((wrong.right != 0).any()):
        return Cause("zero", "all zero", {})
    first = float(got[0, 0])
    if got.numel() >= FEWEST and bool((got == first).all()):
        return Cause("not written", f"all {first:.3g}, as if never written", {"constant": first})
    return None


def _units(error: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """An error in units of sigma, at most 1e6: it would be infinite where sigma is 0."""
    z = torch.where(error == 0, 0.0, error / sigma)
    return z.nan_to_num(nan=1e6, posinf=1e6, neginf=-1e6).clamp(-1e6, 1e6)


def _within(error: torch.Tensor, sigma: torch.Tensor, tolerance: Tolerance) -> bool:
    """Whether rounding explains an error [rows, columns]. The limits of a single row and element are twice
    those of a right output, as rows were chosen because they are wrong."""
    z = _units(error, sigma)
    return (
        float(z.square().mean().sqrt()) <= tolerance.row
        and float(z.square().mean(1).sqrt().max()) <= 2 * tolerance.row
        and float(z.abs().max()) <= 2 * tolerance.element
    )


def _factor(wrong: Wrong) -> Cause | None:
    """One factor for all elements, found by least squares with weights 1 / sigma^2."""
    got, right, sigma = wrong.got, wrong.right, wrong.sigma
    weighted = torch.where(sigma > 0, right / sigma.square(), 0.0)
    size = float((weighted * right).sum())
    factor = float((weighted * got).sum()) / size if size > 0 else math.nan
    # A few elements are a multiple of anything. A tiny factor fits an output that is unlike the right one.
    if not math.isfinite(factor) or abs(factor) < 1e-3 or got.numel() < 4:
        return None
    if not _within(got - factor * right, abs(factor) * sigma, wrong.tolerance):
        return None
    text = "sign flipped" if abs(factor + 1) < 0.003 else f"{factor:.4g} times the reference"
    return Cause("factor", text, {"factor": factor})


def _mistake(wrong: Wrong) -> Cause | None:
    """The known mistakes whose answers equal the wrong rows, except for rounding; the nearest first. Only the
    wrong rows of one index of dimension 0 are looked at."""
    if wrong.layout.answers is None or _within(wrong.got - wrong.right, wrong.sigma, wrong.tolerance):
        return None
    first_indices = wrong.rows // wrong.inner_rows
    index = int(first_indices[0])
    rows = wrong.rows[first_indices == index]
    begin = int(wrong.columns[0]) // BLOCK * BLOCK
    columns = slice(begin, min(begin + MISTAKE_COLUMNS, wrong.all_right.shape[1]))
    got, right, sigma = wrong.elements(rows, columns)
    if got.numel() < FEWEST:
        return None
    try:
        answers = wrong.layout.answers([wrong.layout.numbers(0)[index]], columns)
    except (ImportError, AttributeError, MemoryError, RuntimeError):  # none are listed, or memory is short
        return None
    error_square = float(_units(got - right, sigma).square().mean())
    unexplained = dict[str, float]()  # by mistake: the mean square error that it leaves, in units of sigma
    for name, answer_of_index in _computed(answers, wrong.all_got.dtype):
        answer = answer_of_index.cpu().flatten(0, -2)[rows % wrong.inner_rows].double()
        answer_sigma = _sigma_of_answer(answer, right, sigma)
        left_square = float(_units(got - answer, answer_sigma).square().mean())
        is_explained = left_square <= EXPLAINED * error_square
        if is_explained and _within(got - answer, answer_sigma, wrong.tolerance):
            unexplained[name] = left_square
    if not unexplained:
        return None
    limit = 1.5 * min(unexplained.values()) + 0.1  # up to here a mistake cannot be told from the nearest one
    names = sorted(unexplained, key=unexplained.__getitem__)
    names = [name for name in names if unexplained[name] <= limit][:MOST_NAMES]
    return Cause("mistake", f"equals: {' or '.join(names)}", {"equals": names})


def _sigma_of_answer(answer: torch.Tensor, right: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The sigma of a mistake's answer: a larger output errs by more, and rounding to bf16 by 2^-9."""
    growth = (answer.norm(dim=1) / right.norm(dim=1)).nan_to_num(1.0).clamp(1.0, 1e6)
    return torch.hypot(sigma * growth[:, None], 2.0**-9 * answer)


def _computed(answers: Answers, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields mistakes with the answers that they give, until that has taken too much work."""
    work = Work()
    for name, compute_answer in answers.items():
        try:
            with work:
                answer = compute_answer().to(dtype)
        except TooMuchWork:
            return
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
            continue  # these operands do not allow this mistake
        yield name, answer


def _answer_to_others(wrong: Wrong) -> Cause | None:
    """Whether the rows hold the right answer to other operands."""
    # Of each wrong row, its index along the first dimension of the whole output.
    first_indices = torch.tensor(wrong.layout.numbers(0))[wrong.rows // wrong.inner_rows]
    all_columns = wrong.all_right.shape[-1]
    for name, other in wrong.layout.others.items():
        if other.value.shape[1:] != (*wrong.outer[1:], all_columns):
            continue
        # The other reference may be of other rows: where in it each of these indices is, -1 where it is not.
        other_indices = range(len(other.value)) if other.rows is None else other.rows
        place_of = {index: place for place, index in enumerate(other_indices)}
        places = torch.tensor([place_of.get(index, -1) for index in first_indices.tolist()])
        known = places >= 0
        rows = places[known] * wrong.inner_rows + wrong.rows[known] % wrong.inner_rows
        answer = _elements(other.value.reshape(-1, all_columns), rows, wrong.columns)
        sigma = _elements(other.sigma.reshape(-1, all_columns), rows, wrong.columns)
        # It shows nothing if it lacks more than half of the rows, or if both references are equal there.
        if 2 * int(known.sum()) < len(known) or torch.equal(answer, wrong.right[known]):
            continue
        if _within(wrong.got[known] - answer, sigma, wrong.tolerance):
            return Cause("stale", f"it is the answer to {name}", {"answer_to": name})
    return None


def _other_rows(wrong: Wrong) -> Cause | None:
    """Whether the wrong rows, by a sample of them, hold the right answers of other rows."""
    if len(wrong.columns) < FEWEST:
        return None
    some = _spread(len(wrong.rows), MATCHED_ROWS)
    rows, got = wrong.rows[some], wrong.got[some]
    few = _spread(len(wrong.columns), MATCHED_COLUMNS)
    nearest = _nearest(got[:, few].float(), wrong.all_right[:, wrong.columns[few]].float())
    _, right, sigma = wrong.elements(nearest, wrong.columns)
    left = _units(got - right, sigma).square().mean(1).sqrt()
    moved = (left <= 1.5 * wrong.tolerance.row) & (nearest != rows)
    if float(moved.double().mean()) < 0.9:
        return None
    # Of each moved row its index, and the index of the row whose answer it holds.
    moves = [
        (wrong.index_of(row), wrong.index_of(source))
        for row, source in zip(rows[moved].tolist(), nearest[moved].tolist(), strict=True)
    ]
    return Cause("moved", _moves_in_words(moves, wrong.layout), {"from": moves[:64]})


def _moves_in_words(moves: Sequence[tuple[list[int], list[int]]], layout: Layout) -> str:
    """Says which rows hold the answers of which, by the axis along which they moved if it is one alone."""
    axes = [i for i in range(len(layout.shape) - 1) if any(index[i] != source[i] for index, source in moves)]
    if len(axes) == 1:
        (axis,) = axes
        name = layout.name(axis)
        source_of = {str(index[axis]): str(source[axis]) for index, source in moves}
    else:
        name = "row"
        source_of = {str(index): str(source) for index, source in moves}
    pairs = ", ".join(f"{index} that of {source}" for index, source in list(source_of.items())[:2])
    dots = " ..." if len(source_of) > 2 else ""
    return f"{name}s hold the answers of other {name}s: {pairs}{dots}"


def _nearest(rows: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Of each row, the index of the nearest candidate row."""
    # Each column is taken in units of its size, so that a few large columns do not decide alone.
    size = candidates.square().mean(0).sqrt().clamp(min=1e-30)
    rows, candidates = rows / size, candidates / size
    # The nearest one has the least |candidate - row|^2; |row|^2 is the same for all candidates.
    return (candidates.square().sum(1) - 2 * rows @ candidates.T).argmin(1)


def _no_pattern(wrong: Wrong) -> Cause:
    got, right = wrong.got, wrong.right
    error, size = float((got - right).norm()), float(right.norm())
    share = error / size if size else math.inf
    sizes = float(got.norm()) * size
    correlation = float((got * right).sum()) / sizes if sizes else math.nan
    facts = {"relative": finite(share)}
    if got.numel() < FEWEST or not math.isfinite(correlation):
        return Cause("none", f"off by {_percent(share)} of the value", facts)
    text = f"no pattern, off by {_percent(share)}; correlation with the reference {correlation:.3g}"
    return Cause("none", text, facts | {"correlation": correlation})


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


# Where the wrong elements are


def region_of(
    rows: torch.Tensor, columns: torch.Tensor, layout: Layout, share: float | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Where an output is wrong: for each axis of which not all indices have anything wrong, those that have.
    First in words, then as ranges with both ends for the record.

    rows:    bool, of the output's shape without the columns: which of the compared rows are wrong
    columns: bool [columns]: which columns are wrong in any of them
    share:   the share of the elements at these indices that are wrong; None: the share of the rows
    """
    outer_axes = range(rows.ndim)
    has_wrong = [rows.transpose(0, axis).reshape(rows.shape[axis], -1).any(1) for axis in outer_axes]
    by_axis = [[int(i) for i in of_axis.nonzero().flatten()] for of_axis in (*has_wrong, columns)]
    if share is None:
        share = int(rows.sum()) / max(math.prod(len(indices) for indices in by_axis[:-1]), 1)
    words, facts = [], []
    column_axis = len(layout.shape) - 1
    for axis, indices in zip([*outer_axes, column_axis], by_axis, strict=True):
        size = len(columns) if axis == column_axis else rows.shape[axis]
        if len(indices) == size:
            continue
        numbers, name = layout.numbers(axis), layout.name(axis)
        by_group = _by_group(indices, layout.groups, layout) if axis == 0 and layout.groups else ""
        words.append(by_group or in_words(name, indices, numbers))
        ranges = [[numbers[first], numbers[last]] for first, last in runs_of(indices)]
        facts.append({"axis": name, "ranges": ranges[:64], "count": len(indices), "of": size})
    text = ", ".join(words)
    if share < FULL:
        text = f"parts of {text}" if text else "parts of all"
    return text, facts


def in_words(name: str, indices: Sequence[int], numbers: Sequence[int]) -> str:
    """Indices along an axis in words: `heads 8..15`, `columns 3 and 7`. numbers: of all its indices"""
    if len(indices) == 1:
        return f"{name} {numbers[indices[0]]}"
    ends = [(numbers[first], numbers[last]) for first, last in runs_of(indices)]
    if len(ends) > MOST_RANGES:
        return f"{len(indices)} of {name}s {ends[0][0]}..{ends[-1][1]}"
    *most, last = [str(first) if first == last else f"{first}..{last}" for first, last in ends]
    return f"{name}s {', '.join(most)} and {last}" if most else f"{name}s {last}"


def _by_group(indices: Sequence[int], groups: RowGroups, layout: Layout) -> str:
    """Wrong rows in terms of their sequences or experts, such as `the last token of sequence 3`; empty where
    that says no more than their numbers. indices: their places among the compared indices of dimension 0"""
    members: dict[int, list[int]] = {}  # by group, its rows in the whole output
    for row, groups_of_row in enumerate(groups.of.tolist()):
        for group in groups_of_row:
            members.setdefault(group, []).append(row)
    numbers = layout.numbers(0)
    wrong = {numbers[index] for index in indices}
    # Of each group with wrong rows, all its compared rows. A negative number is no group.
    touched = {
        group: set(rows).intersection(numbers)
        for group, rows in sorted(members.items())
        if group >= 0 and not wrong.isdisjoint(rows)
    }
    row_name, name = layout.name(0), groups.name
    if groups.of.shape[1] > 1:  # A row has several experts: all rows of some experts have to be wrong.
        experts = [group for group, rows in touched.items() if rows <= wrong and len(rows) > 1]
        if len(experts) > MOST_EXPERTS or wrong != {row for expert in experts for row in touched[expert]}:
            return ""
        return f"the {len(wrong)} {row_name}s of {in_words(name, experts, range(max(members) + 1))}"
    are_all = len(touched) == len(members)
    sequences = f"all {name}s" if are_all else in_words(name, [*touched], range(len(members)))
    if all(rows <= wrong for rows in touched.values()):
        return sequences
    if layout.rows is None:  # otherwise further rows of the sequences may be wrong
        # The positions of wrong rows in each sequence are perhaps the same in all of them, or the last ones.
        rows_of = [members[group] for group in touched]
        positions = [[place for place, row in enumerate(rows) if row in wrong] for rows in rows_of]
        if all(of_sequence == positions[0] for of_sequence in positions):
            each = f"each {name}" if are_all else sequences
            return f"{in_words(row_name, positions[0], range(max(map(len, rows_of))))} of {each}"
        if positions == [[len(rows) - 1] for rows in rows_of]:
            return f"the last {row_name} of {sequences}"
    return f"{len(wrong)} {row_name}s of {sequences}"


def wrong_columns(z: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Which columns are off, bool [columns], by the error of the wrong rows in sigma, z [rows, columns].

    The errors of right values have a root mean square near 1, which varies less over more rows. Some columns
    of a wrong range are right by chance, so that a range counts as a whole if enough of its columns are off.
    """
    row_count, column_count = z.shape
    z = z.abs().nan_to_num(nan=1e6, posinf=1e6).clamp(max=1e6)
    off = (z.amax(0) > tolerance.element) | (z.square().mean(0).sqrt() > 1.2 + 2.8 / row_count**0.5)
    off_columns = off.nonzero().flatten().tolist()
    for begin, last in runs_of(off_columns, BLOCK - 1):
        stop = last + 1
        off_count = int(off[begin:stop].sum())
        if off_count < DENSE * (stop - begin):
            continue
        if off_count >= BLOCK:
            # Up to 2 columns between an end and a multiple of BLOCK belong to the range, too.
            to_block = -stop % BLOCK
            begin -= begin % BLOCK if begin % BLOCK <= 2 else 0
            stop += to_block if to_block <= 2 else 0
        off[begin:stop] = True
    if not off_columns:  # the errors are near the limits: mark the segments that exceed the limit of a row
        for begin in range(0, column_count, tolerance.segment or column_count):
            segment = slice(begin, begin + (tolerance.segment or column_count))
            off[segment] = bool((z[:, segment].square().mean(1).sqrt() > tolerance.row).any())
    if row_count < 8 and float(off.double().mean()) > 0.9:  # the others are right by chance
        return torch.ones_like(off)
    return off
