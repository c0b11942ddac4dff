"""How an error looks: zeros, a factor, a shift, rows or columns that changed places, an answer to other
operands, a part of a sum that is missing, coarse rounding, or noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.workers.child.diagnosis.region import Layout, runs

if TYPE_CHECKING:
    import torch

    from kernels.op import Tolerance

MOST_ROWS = 256
"""Wrong rows that are looked at, spread evenly."""
MATCHED_ROWS, MATCHED_COLUMNS = 32, 512
"""Of those, for which every row of the reference is tried, by so many columns."""
TILE = 128
EXPLAINED = 0.02
"""A kind that leaves so little of the squared error is called about right."""
FEWEST = 16
"""Elements of a row that are enough to tell one right row from another."""


Answer = tuple["torch.Tensor", "torch.Tensor"]
"""Values [rows, columns] and their sigmas."""


@dataclass(frozen=True)
class Kind:
    """name: one word for the record; text: in words; facts: for the record"""

    name: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Errors:
    """What is wrong, to be explained.

    got, value, sigma: [rows, columns], of all rows that were compared, which may be many
    wrong:   int64 [n], numbers of those rows that are looked at, all of which are wrong
    columns: int64 [m], which of their columns are
    outer:   the shape of those rows: their dimensions without the columns
    sums:    whether the op's elements are sums of independent terms
    """

    got: torch.Tensor
    value: torch.Tensor
    sigma: torch.Tensor
    wrong: torch.Tensor
    columns: torch.Tensor
    outer: tuple[int, ...]
    layout: Layout
    tolerance: Tolerance
    sums: bool = False

    def __post_init__(self) -> None:
        self.out = self._of(self.got)
        self.right = self._of(self.value)
        self.scale = self._of(self.sigma)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.wrong][:, self.columns].double()

    def units(self, error: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """In sigmas, of an exact value at most 1e6."""
        import torch

        z = torch.where(error == 0, 0.0, error / (self.scale if scale is None else scale))
        return z.nan_to_num(nan=1e6, posinf=1e6, neginf=-1e6).clamp(-1e6, 1e6)

    def explains(self, wanted: torch.Tensor, scale: torch.Tensor | None = None) -> str:
        """`yes` if the output is this within the limits, `about` if nearly all of the error is gone."""
        left = self.units(self.out - wanted, self.scale if scale is None else scale)
        row = left.square().mean(1).sqrt()
        limit = self.tolerance
        within = float(left.square().mean().sqrt()) <= limit.row and float(row.max()) <= 2 * limit.row
        if within and float(left.abs().max()) <= 2 * limit.element:
            return "yes"
        before = self.units(self.out - self.right)
        nearly = bool((left.square().sum(1) <= EXPLAINED * before.square().sum(1)).all())
        # Beside sigmas in the output's own unit, or the smallest elements would decide alone.
        nearly &= float((self.out - wanted).norm() / (self.out - self.right).norm()) ** 2 <= EXPLAINED
        return "about" if nearly else ""


def kind_of(errors: Errors, others: Mapping[str, Answer]) -> Kind:
    """others: the right answers to other operands for the wrong rows, by their names; NaN in rows that are
    not known"""
    for found in (_zeros, _constant, _factor, lambda e: _stale(e, others), _offset, _rows, _columns):
        if kind := found(errors):
            return kind
    return _factors(errors) or _part_of_sum(errors) or _rounding(errors) or _noise(errors)


def _zeros(errors: Errors) -> Kind | None:
    zero = (errors.out == 0).all(1)
    if not bool((errors.right != 0).any()) or not bool(zero.any()):
        return None
    if bool(zero.all()):
        return Kind("zero", "all zero")
    share = float(zero.double().mean())
    return Kind("zero", f"all zero in {share:.0%} of them, others in the rest") if share >= 0.25 else None


def _constant(errors: Errors) -> Kind | None:
    first = float(errors.out[0, 0])
    if errors.out.numel() < FEWEST or not bool((errors.out == first).all()):
        return None
    return Kind("constant", f"all {first:.3g}, as if never written", {"constant": first})


def _slope(out: torch.Tensor, right: torch.Tensor, scale: torch.Tensor) -> float:
    """The factor that fits best, each element weighted by its own sigma."""
    import torch

    weight = torch.where(scale > 0, right / scale.square(), 0.0)
    size = float((weight * right).sum())
    return float((weight * out).sum()) / size if size > 0 else math.nan


def _factor(errors: Errors) -> Kind | None:
    factor = _slope(errors.out, errors.right, errors.scale)
    # One element is a multiple of anything.
    if not math.isfinite(factor) or factor == 0 or errors.out.numel() < 4:
        return None
    fits = errors.explains(factor * errors.right, abs(factor) * errors.scale)
    if not fits:
        return None
    about = "about " if fits == "about" else ""
    return Kind("factor", f"{about}{_times(factor)}", {"factor": factor})


def _times(factor: float) -> str:
    for known, text in ((-1.0, "sign flipped"), (2.0, "doubled"), (0.5, "half")):
        if abs(factor / known - 1) < 0.003:
            return text if known < 0 else f"{text}: {factor:.4g} times the reference"
    return f"{_number(factor)} times the reference"


def _number(factor: float) -> str:
    """With the digits that tell it from 1."""
    off = abs(factor - 1)
    digits = max(3, 2 - math.floor(math.log10(off))) if 0 < off < 0.1 else 3
    return f"{factor:.{digits}g}"


def _stale(errors: Errors, others: Mapping[str, Answer]) -> Kind | None:
    import torch

    for name, given in others.items():
        answer, sigma = (t[:, errors.columns] for t in given)
        known = torch.isfinite(answer).all(1)
        if int(known.sum()) * 2 < len(known) or torch.equal(answer[known], errors.right[known]):
            continue
        # Where these are unknown, nothing is left to explain.
        if errors.explains(torch.where(known[:, None], answer, errors.out), sigma) == "yes":
            return Kind("stale", f"it is the answer to {name}", {"answer_to": name})
    return None


def _offset(errors: Errors) -> Kind | None:
    import torch

    error = errors.out - errors.right
    weight = torch.where(errors.scale > 0, errors.scale.square().reciprocal(), 0.0)
    total = float(weight.sum())
    if total == 0 or error.numel() < FEWEST:
        return None
    offset = float((weight * error).sum()) / total
    # The sum is rounded to bf16, too.
    fits = errors.explains(errors.right + offset, (errors.scale**2 + (2.0**-8 * offset) ** 2).sqrt())
    if not fits:
        return None
    more = "more" if offset > 0 else "less"
    return Kind("offset", f"{abs(offset):.3g} {more} than the reference", {"offset": offset})


# Rows in each other's place


def _rows(errors: Errors) -> Kind | None:
    """Each of some wrong rows is sought among all right ones."""
    import torch

    if len(errors.columns) < FEWEST:
        return None
    chosen = spread(len(errors.wrong), MATCHED_ROWS)
    out, number = errors.out[chosen], errors.wrong[chosen]
    few = spread(len(errors.columns), MATCHED_COLUMNS)
    candidates = errors.value[:, errors.columns[few]].float()
    # In units of each column's size, so that a few large ones do not decide alone.
    size = candidates.square().mean(0).sqrt().clamp(min=1e-30)
    candidates /= size
    sought = out[:, few].float() / size
    near = candidates.square().sum(1) - 2 * sought @ candidates.T
    match = near.argmin(1)

    def fits(match: torch.Tensor) -> torch.Tensor:
        value, scale = (t[match][:, errors.columns].double() for t in (errors.value, errors.sigma))
        left = errors.units(out - value, scale).square().mean(1).sqrt()
        return (left <= 1.5 * errors.tolerance.row) & (match != number)

    # Rows may be equal, as all heads of one token are: the one that differs in one dimension only, then.
    here, there = (list(torch.unravel_index(rows, errors.outer)) for rows in (number, match))
    found = fits(match)
    for axis in range(len(here)):
        near_by = [*here[:axis], there[axis], *here[axis + 1 :]]
        alike = torch.zeros_like(match)
        for k, index in enumerate(near_by):
            alike += index * math.prod(errors.outer[k + 1 :])
        better = fits(alike)
        match, found = torch.where(better, alike, match), found | better
    if float(found.double().mean()) < 0.9:
        return None
    return _moved(_places(number[found], errors.outer), _places(match[found], errors.outer), errors.layout)


def _places(numbers: torch.Tensor, outer: tuple[int, ...]) -> list[tuple[int, ...]]:
    import torch

    return list(zip(*(axis.tolist() for axis in torch.unravel_index(numbers, outer)), strict=True))


def _moved(here: list[tuple[int, ...]], there: list[tuple[int, ...]], layout: Layout) -> Kind:
    """Rows `here` hold the answers of rows `there`."""
    moves = list(zip(here, there, strict=True))
    axes = [axis for axis in range(len(here[0])) if any(h[axis] != t[axis] for h, t in moves)]
    if len(axes) > 1:
        named = [[[layout.numbers(0)[first], *rest] for first, *rest in move] for move in moves]
        pairs = ", ".join(f"{h} that of {t}" for h, t in named[:2])
        return Kind("moved", f"rows hold answers of others: {pairs} ...", {"from": named[:64]})
    axis = axes[0]
    name, numbers = layout.axes[axis], layout.numbers(axis)
    source: dict[int, int] = {}
    consistent = all(source.setdefault(h[axis], t[axis]) == t[axis] for h, t in moves)
    by_number = {numbers[h]: numbers[t] for h, t in source.items()}
    facts = {"axis": name, "from": [[h, t] for h, t in list(by_number.items())[:64]]}
    if not consistent:
        return Kind("moved", f"{name}s hold the answers of others, not always the same", facts)
    return Kind("swapped" if _swaps(by_number) else "moved", _said_of_moves(name, by_number), facts)


def _swaps(source: Mapping[int, int]) -> bool:
    return all(source.get(t) == h and h != t for h, t in source.items())


def _said_of_moves(name: str, source: Mapping[int, int]) -> str:
    steps = Counter(t - h for h, t in source.items())
    step, often = steps.most_common(1)[0]
    if len(source) > 1 and often >= 0.9 * len(source):  # the first or last may come from the other end
        return f"{name} i holds the answer of {name} i{step:+d}"
    if _swaps(source):
        pairs = [f"{h} and {t}" for h, t in source.items() if h < t]
        if len(steps) == 2 and len(pairs) > 1:
            return f"{name}s swapped in pairs {max(steps)} apart ({pairs[0]}, ...)"
        return f"{name}s {', '.join(pairs[:3])} are swapped"
    if len(set(source.values())) == 1 and len(source) > 1:
        return f"they hold the answer of {name} {next(iter(source.values()))}"
    pairs = [f"{h} that of {t}" for h, t in source.items()]
    more = f" and {len(pairs) - 2} more" if len(pairs) > 2 else ""
    if len(pairs) == 1:
        return f"{name} {next(iter(source))} holds the answer of {name} {next(iter(source.values()))}"
    return f"{name}s hold each other's answers: {', '.join(pairs[:2])}{more}"


# Columns in each other's place


def _columns(errors: Errors) -> Kind | None:
    """The whole of the wrong columns first, then each range of them, and its two halves."""
    import torch

    if len(errors.columns) < FEWEST:
        return None
    chosen = spread(len(errors.wrong), MATCHED_ROWS)
    numbers = errors.wrong[chosen]
    out, value, sigma = (t[numbers].double() for t in (errors.got, errors.value, errors.sigma))
    columns = errors.columns.tolist()

    def holds(here: list[int], there: list[int]) -> bool:
        at, of = torch.tensor(here), torch.tensor(there)
        inside = (of >= 0) & (of < value.shape[1])
        at, of = at[inside], of[inside]
        if len(at) < max(0.8 * len(here), FEWEST) or torch.equal(at, of):
            return False
        left = errors.units(out[:, at] - value[:, of], sigma[:, of])
        return float(left.square().mean().sqrt()) <= 1.25 * errors.tolerance.row

    for step in _steps(out, value, errors.columns):
        if holds(columns, [c + step for c in columns]):
            text = f"columns are shifted: column c holds the answer of column c{step:+d}"
            if len(columns) < value.shape[1]:
                first, last = columns[0] + step, columns[-1] + step
                text = f"they hold the answer of columns {max(first, 0)}..{min(last, value.shape[1] - 1)}"
            return Kind("shifted columns", text, {"shift": step})
    bit = 1
    while bit < value.shape[1]:
        if holds(columns, [c ^ bit for c in columns]):
            what = "neighbouring columns" if bit == 1 else f"neighbouring blocks of {bit} columns"
            return Kind("swapped columns", f"{what} are swapped", {"swapped": bit})
        bit *= 2
    half = value.shape[1] // 2
    if value.shape[1] % 2 == 0 and len(columns) > half:
        interleaved = [c // 2 + c % 2 * half for c in columns]
        apart = [c % half * 2 + c // half for c in columns]
        if holds(columns, interleaved):
            return Kind("interleaved columns", "the two halves of the columns are interleaved")
        if holds(columns, apart):
            return Kind("interleaved columns", "even and odd columns stand in two halves, not interleaved")
        if holds(columns, [value.shape[1] - 1 - c for c in columns]):
            return Kind("reversed columns", "columns are in reverse order")
    return _tiles(errors, out, value, holds)


def _tiles(errors: Errors, out: torch.Tensor, value: torch.Tensor, holds: Any) -> Kind | None:
    import torch

    found = runs(errors.columns.tolist())
    if len(found) == 1 and (found[0][1] - found[0][0]) % 2 == 1:
        first, last = found[0]
        middle = (first + last + 1) // 2
        found = [(first, middle - 1), (middle, last)]
    if not 1 < len(found) <= 4:
        return None
    steps: list[int] = []
    for first, last in found:
        here = list(range(first, last + 1))
        fit = (s for s in _steps(out, value, torch.tensor(here)) if holds(here, [c + s for c in here]))
        if (step := next(fit, None)) is None:
            return None
        steps.append(step)
    names = [f"{first}..{last}" for first, last in found]
    if len(found) == 2 and steps[0] == -steps[1]:
        text = f"columns {names[0]} and {names[1]} are swapped"
        return Kind("swapped columns", text, {"shifts": steps})
    moves = [
        f"{name} those of {first + step}.."
        for name, (first, _), step in zip(names, found, steps, strict=True)
    ]
    return Kind(
        "moved columns", f"columns hold each other's answers: {', '.join(moves[:2])}", {"shifts": steps}
    )


def _steps(out: torch.Tensor, value: torch.Tensor, columns: torch.Tensor) -> list[int]:
    """The likeliest shifts, by how often signs agree: large columns do not decide alone."""
    import torch

    size = value.shape[1]
    masked = torch.zeros_like(value)
    masked[:, columns] = out[:, columns].sign()
    ahead = torch.fft.rfft(value.sign(), 2 * size)
    agree = torch.fft.irfft(torch.fft.rfft(masked, 2 * size).conj() * ahead, 2 * size).sum(0)
    best = agree.topk(min(4, len(agree))).indices.tolist()
    return [step for b in best if (step := b if b < size else b - 2 * size)]


# What is not in another place


def _factors(errors: Errors) -> Kind | None:
    """Factors of their own for tiles of columns, for rows, or for both."""
    import torch

    count, width = errors.out.shape
    tile = (errors.columns // TILE - errors.columns[0] // TILE).expand(count, width)
    row = torch.arange(count)[:, None].expand(count, width)
    tiles = int(tile.max()) + 1
    options = [
        ("for each 128 columns", tile, tiles > 1),
        ("for each row", row, count > 1 and width >= FEWEST),
        ("for each row and 128 columns", row * tiles + tile, count > 1 and tiles > 1),
    ]
    weight = torch.where(errors.scale > 0, errors.right / errors.scale.square(), 0.0)
    for text, part, possible in options:
        parts = int(part.max()) + 1
        if not possible or count * width < FEWEST * parts:
            continue
        shared, size = (
            torch.zeros(parts, dtype=torch.float64).index_add_(0, part.flatten(), (weight * of).flatten())
            for of in (errors.out, errors.right)
        )
        known = size > 0
        factor = torch.where(known, shared / size, 1.0)
        of_each = factor[part]
        fits = errors.explains(of_each * errors.right, of_each.abs() * errors.scale)
        if fits:
            about = "about " if fits == "about" else ""
            least, most = float(factor[known].min()), float(factor[known].max())
            what = (
                f"{about}a factor of its own {text}, {_number(least)} to {_number(most)} times the reference"
            )
            return Kind("factors", what, {"factors": [least, most], "each": text})
    return None


def _part_of_sum(errors: Errors) -> Kind | None:
    """Where an element is a sum of independent terms, the error of a lost part is minus that part: its
    product with the reference is minus its own square, of a part that was added twice plus it. Noise has
    neither."""
    import torch

    if not errors.sums:
        return None
    # Beside the sigma of a row and a tile: an element's own grows with its value.
    _, place = errors.columns.div(TILE, rounding_mode="floor").unique(return_inverse=True)
    squares = torch.zeros(len(errors.out), int(place.max()) + 1, dtype=torch.float64)
    squares.index_add_(1, place, errors.scale.square())
    scale = (squares / place.bincount()).sqrt()[:, place].clamp(min=1e-300)
    error, right = (errors.out - errors.right) / scale, errors.right / scale
    square, whole = error.square().sum(1), right.square().sum(1).clamp(min=1e-300)
    # Row by row: of rows that differ in size a few would decide.
    slope, uncertain = (error * right).sum(1) / square, (whole / square / error.shape[1]).sqrt()
    sure = (uncertain < 0.25) & (square < 0.9 * whole)
    if not bool(sure.any()) or float((uncertain[sure] / int(sure.sum()) ** 0.5).median()) > 0.08:
        return None
    share, middle = float((square / whole)[sure].median()), float(slope[sure].median())
    for sign, text in ((-1, "is missing"), (1, "was added twice")):
        # Parts of real sums have a little in common; what is scaled by 1/4 or 3/4 lies beyond.
        alike = float(((0.5 < sign * slope[sure]) & (sign * slope[sure] < 2)).double().mean())
        if 0.8 < sign * middle < 1.4 and alike > 0.75:
            return Kind("part of a sum", f"as if {_percent(share)} of each sum {text}", {"share": share})
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _rounding(errors: Errors) -> Kind | None:
    """The relative errors of rounding to nearest end sharply at half a unit, unlike those of noise."""
    large = errors.right.abs() > 0.25 * float(errors.right.square().mean().sqrt())
    relative = ((errors.out - errors.right).abs() / errors.right.abs())[large]
    if len(relative) < MOST_ROWS:
        return None
    most, typical = float(relative.max()), float(relative.square().mean().sqrt())
    bits = round(-math.log2(most)) - 1 if 0 < most < 1 else 0
    half = 2.0 ** -(bits + 1)
    if not 1 <= bits <= 6 or not 0.97 < most * (1 + half) / half < 1.08 or most > 2.7 * typical:
        return None
    format = {3: " (fp8 e4m3)", 2: " (fp8 e5m2)"}.get(bits, "")
    return Kind(
        "rounding", f"as rounding the output to {bits} bits of mantissa would{format}", {"bits": bits}
    )


def _noise(errors: Errors) -> Kind:
    error = errors.out - errors.right
    size = float(errors.right.square().mean().sqrt())
    share = float(error.square().mean().sqrt()) / size if size else math.inf
    if share > 1:
        return Kind("irregular", "unlike the reference, with no regular pattern")
    if error.numel() < FEWEST:
        return Kind("element", f"off by {_percent(share)} of the value", {"relative": share})
    # Errors of one sign are no rounding.
    even = 0.4 < float((error > 0).double().mean()) < 0.6
    text = f"{'like noise' if even else 'no regular pattern'}, {_percent(share)} of the values"
    return Kind("noise" if even else "irregular", text, {"relative": share})


def spread(count: int, most: int) -> torch.Tensor:
    """At most so many of 0 .. count - 1, both ends among them."""
    import torch

    if count <= most:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most).round().long()
