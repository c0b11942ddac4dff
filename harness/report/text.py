"""Numbers as text: times and ratios in the digits that their intervals support. And grouping by a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from harness.results.schema import Verdict
    from harness.statistics.paired import Comparison

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

WIDE = 20.0  # an interval with 1 in it tells nothing if its upper end is more than so many times the lower


class TimeInterval(NamedTuple):
    """A time and the ends of its interval, in microseconds; an end may be unknown."""

    us: float
    low_us: float | None
    high_us: float | None


class Unit(NamedTuple):
    us: float  # how many microseconds it has
    name: str


def decimals(half_width: float) -> int:
    """How many digits to print after the point of a value that is known to plus or minus `half_width`: up to
    the first uncertain digit, and one more where that digit is a 1 or a 2."""
    return max(0, -math.floor(math.log10(half_width / 3))) if half_width > 0 else 3


def value_and_interval(value: float, low: float | None, high: float | None) -> tuple[str, str]:
    """A value in the digits that its interval supports; and the interval as `± 1.1`, or as `(154 to 727)`
    where it is wider than a third of the value. The interval is empty where an end is missing."""
    if low is None or high is None:
        return f"{value:.4g}", ""
    half_width = max(value - low, high - value)
    digits = max(decimals(half_width), -math.floor(math.log10(value)))
    interval = f"± {half_width:.{digits}f}"
    if half_width > value / 3:
        interval = f"({low:.{digits}f} to {high:.{digits}f})"
    return f"{value:.{digits}f}", interval


def ratio_and_interval(comparison: Verdict | Comparison) -> tuple[str, str]:
    """`1.94x` and `(1.85 to 2.03)`, in the digits that the interval supports. The interval is empty where an
    end is missing. The first text is `?` for None, `not known` if the interval tells nothing, see WIDE."""
    ratio, low, high = comparison.ratio, comparison.low, comparison.high
    if ratio is None:
        return "?", ""
    if low is None or high is None:
        return f"{ratio:.2f}x", ""
    if low <= 0 or math.isinf(high) or (low < 1 < high and high > WIDE * low):
        return "not known", ""
    digits = min(3, decimals((high - low) / 2))
    return f"{ratio:.{digits}f}x", f"({low:.{digits}f} to {high:.{digits}f})"


def ratio_text(comparison: Verdict | Comparison) -> str:
    """`1.94x (1.85 to 2.03)`, see `ratio_and_interval`."""
    return " ".join(ratio_and_interval(comparison)).rstrip()


def short_ratio(comparison: Verdict | Comparison) -> str:
    """`1.94x`, in the digits that the interval supports."""
    ratio, _ = ratio_and_interval(comparison)
    return ratio


def versus(comparison: Verdict | Comparison, other: str, too_noisy: bool) -> str:
    """What a comparison says of its first row, in words; `other` names the second: `1.94x torch.sdpa (1.85 to
    2.03)`, or `the same as torch.sdpa (0.99x to 1.01x)`. An unclear verdict is called too noisy where the
    noise is so large that no two rows can be called the same."""
    ratio, interval = ratio_and_interval(comparison)
    if comparison.verdict == "faster":
        return f"{ratio} {other} {interval}"
    words = {"same": "the same as", "unclear": "indistinguishable from",
             "slower": "slower, round by round, than"}  # fmt: skip
    interval = interval.replace(" to ", "x to ").replace(")", "x)")
    noisy = ", too noisy" if too_noisy and comparison.verdict == "unclear" else ""
    return f"{words[comparison.verdict]} {other} {interval}".rstrip() + noisy


def counted(count: int, noun: str = "case") -> str:
    """`1 case`, `2 cases`"""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def how_summed(weights: Iterable[float]) -> str:
    """In words how the times of cases with these weights are summed."""
    return "weighted by the suite" if len(set(weights)) > 1 else "all cases together"


def ratio_column(ratios: Sequence[Verdict | Comparison | None]) -> list[str]:
    """Ratios with the ends of their intervals, aligned at their points; an empty text for None."""
    texts = [ratio_and_interval(r) if r else ("", "") for r in ratios]
    numbers = aligned([number for number, _ in texts])
    return [f"{number} {interval}".rstrip() for number, (_, interval) in zip(numbers, texts, strict=True)]


def time_column(times: Sequence[TimeInterval]) -> tuple[str, list[str]]:
    """The header and the cells of a column. All are in the unit of the smallest time, which the header names.
    Where the largest time would have too many digits in it, each cell names a unit of its own."""
    smallest = unit(min((time.us for time in times), default=1.0))
    share_unit = max((time.us for time in times), default=1.0) / smallest.us < 1e4
    numbers, suffixes = [], []
    for time in times:
        of_cell = smallest if share_unit else unit(time.us)
        number, interval = _in_unit(time, of_cell)
        numbers.append(number)
        suffixes.append(interval if share_unit else f"{of_cell.name} {interval}")
    cells = [f"{number} {suffix}".rstrip() for number, suffix in zip(aligned(numbers), suffixes, strict=True)]
    return (f"time, {smallest.name}" if share_unit else "time"), cells


def time_with_unit(time: TimeInterval) -> str:
    """`33.4 ms`: in the digits that the interval supports."""
    own = unit(time.us)
    number, _ = _in_unit(time, own)
    return f"{number} {own.name}"


def _in_unit(time: TimeInterval, unit: Unit) -> tuple[str, str]:
    low, high = (None if end is None else end / unit.us for end in (time.low_us, time.high_us))
    return value_and_interval(time.us / unit.us, low, high)


def unit(us: float) -> Unit:
    """The unit in which a time in microseconds reads well."""
    if us >= 1e6:
        return Unit(1e6, "s")
    return Unit(1e3, "ms") if us >= 1e3 else Unit(1.0, "us")


def aligned(numbers: Sequence[str]) -> list[str]:
    """The numbers padded to one width and aligned at their points; an empty text stays empty."""
    halves = []  # of each number the digits before the point, and what follows them
    for number in numbers:
        end = number.lstrip("0123456789")
        halves.append((number.removesuffix(end), end))
    start_width = max((len(start) for start, _ in halves), default=0)
    end_width = max((len(end) for _, end in halves), default=0)
    return [start.rjust(start_width) + end.ljust(end_width) if start or end else "" for start, end in halves]


def significant(value: float | None, digits: int = 3) -> str:
    """The value in so many significant digits, or as a whole number if that has more; empty for None."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if value < 10**digits - 0.5 else f"{value:.0f}"


def microseconds(value: float | None) -> str:
    """A time in up to four digits with the unit that reads well: `48.1 ms`, `312 us`; empty for None."""
    if value is None:
        return ""
    own = unit(value)
    return f"{value / own.us:.4g} {own.name}"


def duration(seconds: float) -> str:
    """A duration of a microsecond or so: `1.2 us`, `25 ns`."""
    return f"{seconds * 1e6:.3g} us" if seconds >= 1e-6 else f"{seconds * 1e9:.3g} ns"


def ranged(
    value: float | None, low: float | None, high: float | None, form: str = "+.4g", unit: str = ""
) -> str:
    """`2.00x (1.90 to 2.10)`: a value with its unit and the ends of its interval; an end that is not known is
    `?`. An unknown value, or an interval without ends, is left out. The form is as in `format`; where `g`
    would print an exponent, numbers have no digits after the point instead."""
    sign, _, precision = form.partition(".")  # `+.4g` -> `+`, `4g`
    known = [abs(number) for number in (value, low, high) if number is not None]
    if precision.endswith("g") and max(known, default=0) >= 10 ** int(precision[:-1]) - 0.5:
        form = f"{sign}.0f"
    texts = [] if value is None else [f"{value:{form}}{unit}"]
    if low is not None or high is not None:
        low_text, high_text = ("?" if end is None else f"{end:{form}}" for end in (low, high))
        texts.append(f"({low_text} to {high_text})")
    return " ".join(texts)


def extent(values: Iterable[float | None], digits: int = 3) -> str:
    """The smallest and the largest value, `12-48`, or the one value that all have; None is left out."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = significant(min(known), digits), significant(max(known), digits)
    return low if low == high else f"{low}-{high}"


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by their key, in the order in which the keys come first."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
