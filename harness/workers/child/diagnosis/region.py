"""Where an output is wrong: rows, heads, sequences, experts, tiles and columns, as ranges in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kernels.op import RowGroups, Tolerance

TILES = (256, 128, 64, 32, 16)
MOST_RANGES = 4
FEW_GROUPS = 3
BLOCK = 16
"""Columns are first judged by so many together."""
LEAST_SNAPPED = 12
"""Columns of a range whose edges may be those of blocks."""
RARE = 1e-3
FULL = 0.95
"""A box of which so much is wrong is called wrong as a whole."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """How the output of a case is laid out.

    shape:  of the whole output
    axes:   what an index along each dimension counts, the last the columns
    rows:   the numbers of the rows of the first dimension that were compared; None: all
    groups: what those rows belong to, by their number in the whole output
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    rows: Sequence[int] | None = None
    groups: RowGroups | None = None

    @staticmethod
    def of(
        shape: Sequence[int],
        axes: Sequence[str] = (),
        rows: Sequence[int] | None = None,
        groups: RowGroups | None = None,
    ) -> Layout:
        """An op that names no axes has rows and columns."""
        plain = ["row", *(f"index {i}" for i in range(1, len(shape) - 1)), "column"][-len(shape) :]
        return Layout(tuple(shape), tuple(axes) if len(axes) == len(shape) else tuple(plain), rows, groups)

    def numbers(self, axis: int) -> list[int]:
        """What the compared indices along an axis are called."""
        return list(self.rows) if axis == 0 and self.rows is not None else list(range(self.shape[axis]))


@dataclass(frozen=True)
class Region:
    """text: empty where all that was compared is wrong; facts: for the record, ranges with both ends"""

    text: str
    facts: list[dict[str, Any]] = field(default_factory=list)


def region_of(
    rows: torch.Tensor, columns: torch.Tensor, layout: Layout, share: float | None = None
) -> Region:
    """rows:    bool, of the output's shape without its columns: which of those compared are wrong
    columns: bool [columns], which are wrong in any of them
    share:   how much of the box that these span is wrong; None: what the rows say
    """
    axes = [*range(rows.ndim), len(layout.shape) - 1]
    hit = [rows.flatten(1).any(1) if rows.ndim > 1 else rows]
    hit += [rows.transpose(0, axis).flatten(1).any(1) for axis in range(1, rows.ndim)]
    wrong = [[int(i) for i in h.nonzero().flatten()] for h in (*hit, columns)]
    if share is None:
        spanned = 1
        for indices in wrong[:-1]:
            spanned *= len(indices)
        share = int(rows.sum()) / max(spanned, 1)
    words, facts = [], []
    for axis, indices in zip(axes, wrong, strict=True):
        size = len(columns) if axis == axes[-1] else rows.shape[axis]
        numbers, name = layout.numbers(axis), layout.axes[axis]
        if len(indices) < size:
            grouped = _grouped(indices, layout) if axis == 0 and layout.groups else ""
            words.append(grouped or in_words(name, indices, numbers))
            ranges = [[numbers[first], numbers[last]] for first, last in runs(indices)]
            facts.append({"axis": name, "ranges": ranges[:64], "count": len(indices), "of": size})
    text = ", ".join(words)
    if share < FULL:
        text = f"parts of {text}" if text else "parts of all"
    return Region(text, facts)


def runs(indices: Sequence[int]) -> list[Range]:
    """First and last of each series of consecutive numbers, ascending."""
    found = []
    for _, group in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        found.append((members[0], members[-1]))
    return found


def in_words(name: str, indices: Sequence[int], numbers: Sequence[int]) -> str:
    """`heads 8..15`, `columns 128..255 (tile 1 of 128)`, `every 16th column from 3`.

    numbers: what the indices of the whole axis are called
    """
    size, found = len(numbers), runs(indices)
    if len(indices) == 1:
        return f"{name} {numbers[indices[0]]}"
    if len(found) == 1 and numbers[-1] == size - 1:
        return f"{name}s {_range(found[0], numbers)}{_tile(found[0], size)}"
    if regular := _every(name, found, size):
        return regular
    if len(found) > MOST_RANGES:
        return f"{len(indices)} of {name}s {_range((indices[0], indices[-1]), numbers)}"
    *most, last = [_range(each, numbers) for each in found]
    return f"{name}s {', '.join(most)} and {last}" if most else f"{name}s {last}"


def _range(ends: Range, numbers: Sequence[int]) -> str:
    first, last = numbers[ends[0]], numbers[ends[1]]
    return f"{first}" if first == last else f"{first}..{last}"


def _tile(ends: Range, size: int) -> str:
    """Which tiles a range is, where it begins and ends with tiles of a size that kernels have."""
    first, stop = ends[0], ends[1] + 1
    for tile in TILES:
        if first % tile == 0 and stop % tile == 0 and tile < size:
            begin, end = first // tile, stop // tile - 1
            return f" (tile {begin} of {tile})" if begin == end else f" (tiles {begin}..{end} of {tile})"
    if stop == size and first % TILES[-1] == 0:
        return ", to the end"
    return ""


def _every(name: str, found: Sequence[Range], size: int) -> str:
    """Ranges of one length at one distance from each other, over the whole axis; of single numbers some may
    be missing, which were right by chance."""
    if len(found) < 3:
        return ""
    begins = [first for first, _ in found]
    length = max(last - first + 1 for first, last in found[:-1])
    step = math.gcd(*(after - before for before, after in itertools.pairwise(begins)))
    begin = begins[0] % step
    wanted = len(range(begin, size, step))
    if step <= length or len(found) < (0.75 * wanted if length == 1 and wanted > 8 else wanted):
        return ""
    if length == 1:
        ordinal = {2: "2nd", 3: "3rd"}.get(step, f"{step}th")
        return f"every {ordinal} {name} from {begin}"
    if any(last - first + 1 != length for first, last in found[:-1]):
        return ""
    return f"{name}s {begin}..{begin + length - 1} of every {step}"


def _grouped(indices: Sequence[int], layout: Layout) -> str:
    """In terms of what the rows belong to, where that says more than their numbers do; empty where not."""
    assert layout.groups is not None
    numbers = layout.numbers(0)
    of = layout.groups.of[numbers]
    if of.shape[1] == 1:
        return _of_sequences(indices, of[:, 0].tolist(), layout)
    return _of_experts(indices, of.tolist(), layout)


def _of_sequences(indices: Sequence[int], of: list[int], layout: Layout) -> str:
    """Rows that each belong to one group: which groups, and which of their rows."""
    assert layout.groups is not None
    name, axis = layout.groups.name, layout.axes[0]
    every = layout.groups.of[:, 0].tolist()
    begins: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for row, group in enumerate(every):
        begins.setdefault(group, row)
        lengths[group] = lengths.get(group, 0) + 1
    compared = {group: of.count(group) for group in dict.fromkeys(of)}
    wrong: dict[int, list[int]] = {}
    numbers = layout.numbers(0)
    for index in indices:
        wrong.setdefault(of[index], []).append(numbers[index] - begins[of[index]])
    groups = sorted(wrong)
    all_of_them = len(groups) == len(lengths)
    which = f"all {name}s" if all_of_them else in_words(name, groups, range(len(lengths)))
    if all(len(wrong[group]) == compared[group] for group in groups):
        return which
    if layout.rows is not None:
        return f"{len(indices)} {axis}s of {which}"
    where = f"of each {name}" if all_of_them else f"of {which}"
    if len({tuple(wrong[group]) for group in groups}) == 1:
        first = wrong[groups[0]]
        return f"{in_words(axis, first, range(max(lengths[g] for g in groups)))} {where}"
    ends = {tuple(lengths[group] - 1 - i for i in wrong[group]) for group in groups}
    if len(ends) == 1 and (from_end := next(iter(ends)))[-1] == 0 and len(runs(from_end[::-1])) == 1:
        last = f"the last {axis}" if len(from_end) == 1 else f"the last {len(from_end)} {axis}s"
        return f"{last} {where}"
    return f"{len(indices)} {axis}s of {which}"


def _of_experts(indices: Sequence[int], of: list[list[int]], layout: Layout) -> str:
    """Rows that each belong to several groups: the few all of whose rows are wrong, if those are all that is
    wrong. Groups of one row tell no more than the row."""
    assert layout.groups is not None
    rows_of: dict[int, set[int]] = {}
    for row, groups in enumerate(of):
        for group in groups:
            if group >= 0:
                rows_of.setdefault(group, set()).add(row)
    wrong = set(indices)
    candidates = {group: rows for group, rows in rows_of.items() if rows <= wrong and len(rows) > 1}
    left, chosen = set(wrong), list[int]()
    while left and candidates and len(chosen) < FEW_GROUPS:
        group = max(candidates, key=lambda g: (len(candidates[g] & left), len(candidates[g])))
        if not candidates[group] & left:
            break
        chosen.append(group)
        left -= candidates.pop(group)
    if left or not chosen:
        return ""
    axis, name = layout.axes[0], layout.groups.name
    which = in_words(name, sorted(chosen), range(max(rows_of) + 1))
    return f"the {len(wrong)} {axis}s of {which}"


def wrong_columns(z: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Which columns are off in these rows, bool [columns], by the error there in units of sigma.

    z: [rows, columns], rows that are wrong

    Noise about a right value has a root mean square near 1 and every limit is above that, so blocks of
    columns beyond 3 are off, and those beside them beyond 1.7 with them. Edges are then found column by
    column, unless columns that happen to be near the right value can explain what is missing up to the grid.
    """
    import torch

    count, size = z.shape
    z = z.abs().nan_to_num(nan=1e6, posinf=1e6).clamp(max=1e6)
    column = z.square().mean(0).sqrt()
    beyond = z.amax(0) > tolerance.element
    padded = torch.nn.functional.pad(column.square(), (0, -size % BLOCK), value=torch.nan)
    block = padded.view(-1, BLOCK).nanmean(1).sqrt()
    if float(block.max()) < 2 * tolerance.row:
        return _faint(z, beyond, tolerance)
    weak, strong = block > 1.7, block > 3.0
    off = torch.zeros_like(beyond)
    for first, last in runs(weak.nonzero().flatten().tolist()):
        if bool(strong[first : last + 1].any()):
            start, stop = first * BLOCK, min(size, (last + 1) * BLOCK)
            off[start:stop] = _edged(column[start:stop], count)
    # A few blocks of a row that errs everywhere are near the right value by chance.
    return torch.ones_like(off) if float(off.double().mean()) > 0.9 and count < 8 else off | beyond


def _edged(column: torch.Tensor, count: int) -> torch.Tensor:
    """Which of these columns are off, bool, by their root mean squares over so many rows. Columns that are
    near the right value by chance are counted with those around them."""
    import torch

    cut = 1.2 + 2.8 / count**0.5  # beyond what is right, which varies the less the more rows there are
    clear = (column > cut).nonzero().flatten().tolist()
    if not clear:
        return torch.ones_like(column, dtype=torch.bool)
    near = min(1.0, 0.8 * cut / float(column[clear].median()))  # the chance that a normal number lies within
    by_chance = near ** min(count, 50)
    first, stop = clear[0], clear[-1] + 1
    whole = stop - first
    if whole - len(clear) > max(3 * by_chance * whole + min(2.0, whole / 8), 0.1 * whole):
        return column > cut
    if whole >= LEAST_SNAPPED:
        first = 0 if by_chance**first >= RARE else first
        stop = len(column) if by_chance ** (len(column) - stop) >= RARE else stop
    off = torch.zeros_like(column, dtype=torch.bool)
    off[first:stop] = True
    return off


def _faint(z: torch.Tensor, beyond: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Of errors near the limits: the segments that exceed theirs, or else the single columns."""
    import torch

    width = tolerance.segment or z.shape[1]
    off = torch.zeros_like(beyond)
    for first in range(0, z.shape[1], width):
        if bool((z[:, first : first + width].square().mean(1).sqrt() > tolerance.row).any()):
            off[first : first + width] = True
    return off if bool(off.any()) else beyond
