"""Numbers as text: times and ratios in the digits that their intervals support; groups."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from harness.results.schema import Verdict
    from harness.statistics.paired import Comparison

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

WIDE = 20.0
"""An interval whose upper end is more than this many times the lower, with 1 between, tells nothing."""


def decimals(half_width: float) -> int:
    """How many digits to print after the point of a value that is known to plus or minus `half_width`: up to
    the first uncertain digit, and one more where that digit is a 1 or a 2."""
    return max(0, -math.floor(math.log10(half_width / 3))) if half_width > 0 else 3


def uncertain(value: float, low: float | None, high: float | None) -> tuple[str, str]:
    """A value in the digits that its interval supports; and the interval, as `± 1.1` or `(154 to 727)`."""
    if low is None or high is None:
        return f"{value:.4g}", ""
    half = max(value - low, high - value)
    digits = max(decimals(half), -math.floor(math.log10(value)))
    number, low_end, high_end, more = (f"{v:.{digits}f}" for v in (value, low, high, half))
    return number, f"({low_end} to {high_end})" if half > value / 3 else f"± {more}"


def uncertain_ratio(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    """`1.94x` and `(1.85 to 2.03)`, in the digits that the interval supports. The interval is empty where an
    end is missing; the value is `?` without a ratio, and `not known` where the interval holds everything."""
    if value is None:
        return "?", ""
    if low is None or high is None:
        return f"{value:.2f}x", ""
    if low <= 0 or math.isinf(high) or (low < 1 < high and high > WIDE * low):
        return "not known", ""
    digits = min(3, decimals((high - low) / 2))
    return f"{value:.{digits}f}x", f"({low:.{digits}f} to {high:.{digits}f})"


def ratio_text(of: Verdict | Comparison) -> str:
    """`1.94x (1.85 to 2.03)`, see `uncertain_ratio`."""
    return " ".join(uncertain_ratio(of.ratio, of.low, of.high)).rstrip()


def short_ratio(of: Verdict | Comparison) -> str:
    """`1.94x`, in the digits that the interval supports."""
    return uncertain_ratio(of.ratio, of.low, of.high)[0]


def versus(of: Verdict | Comparison, other: str, too_noisy: bool) -> str:
    """What a comparison with another row says of the first, in words: `1.94x torch.sdpa (1.85 to 2.03)`."""
    value, ends = uncertain_ratio(of.ratio, of.low, of.high)
    if of.verdict == "faster":
        return f"{value} {other} {ends}"
    slower = "slower, round by round, than"
    word = {"same": "the same as", "unclear": "indistinguishable from", "slower": slower}
    ends = ends.replace(" to ", "x to ").replace(")", "x)")
    noisy = ", too noisy" if too_noisy and of.verdict == "unclear" else ""
    return f"{word[of.verdict]} {other} {ends}".rstrip() + noisy


def counted(count: int, what: str = "case") -> str:
    """`1 case`, `2 cases`"""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def together(weights: Iterable[float]) -> str:
    """How cases of these weights are summed."""
    return "weighted by the suite" if len(set(weights)) > 1 else "all cases together"


def ratio_column(ratios: Sequence[Verdict | Comparison | None]) -> list[str]:
    """Ratios with the ends of their intervals, aligned at their points; an empty text for None."""
    parts = [uncertain_ratio(of.ratio, of.low, of.high) if of else ("", "") for of in ratios]
    numbers = aligned([number for number, _ in parts])
    return [f"{number} {ends}".rstrip() for number, (_, ends) in zip(numbers, parts, strict=True)]


Interval = tuple[float, float | None, float | None]  # a time and the ends of its interval, in microseconds


def time_column(times: Sequence[Interval | None]) -> tuple[str, list[str]]:
    """The header and the cells of a column: all in the unit of the smallest time, unless that makes other
    times too long to read, which then have units of their own."""
    known = [time[0] for time in times if time]
    least = unit(min(known, default=1.0))
    together = max(known, default=1.0) / least[0] < 1e4
    units = [least if together or time is None else unit(time[0]) for time in times]
    parts = [
        ("", "") if time is None else uncertain(*_divided(time, size))
        for time, (size, _) in zip(times, units, strict=True)
    ]
    numbers = aligned([number for number, _ in parts])
    cells = [
        " ".join(filter(None, [number, "" if together or not number else name, spread])).rstrip()
        for number, (_, spread), (_, name) in zip(numbers, parts, units, strict=True)
    ]
    return (f"time, {least[1]}" if together else "time"), cells


def time_with_unit(time: Interval) -> str:
    """`33.4 ms`: in the digits that the interval supports."""
    size, name = unit(time[0])
    return f"{uncertain(*_divided(time, size))[0]} {name}"


def _divided(time: Interval, by: float) -> Interval:
    value, low, high = time
    return value / by, low and low / by, high and high / by


def unit(us: float) -> tuple[float, str]:
    """The unit in which a time in microseconds reads well: how many microseconds it has, and its name."""
    if us >= 1e6:
        return 1e6, "s"
    return (1e3, "ms") if us >= 1e3 else (1.0, "us")


def aligned(numbers: Sequence[str]) -> list[str]:
    """The numbers padded to one width and aligned at their points; an empty text stays empty."""
    parts = [re.fullmatch(r"(\d*)(.*)", number) for number in numbers]
    split = [part.groups() if part else ("", "") for part in parts]
    before, after = (max((len(part[side]) for part in split), default=0) for side in (0, 1))
    return [f"{whole:>{before}}{rest:<{after}}" if whole or rest else "" for whole, rest in split]


def significant(value: float | None, digits: int = 3) -> str:
    """The value in so many significant digits, or in all digits before the point; an empty text for None."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if value < 10**digits - 0.5 else f"{value:.0f}"


def microseconds(value: float | None) -> str:
    """A time in up to four digits with its unit: `48.1 ms`, `312 us`; an empty text for None."""
    if value is None:
        return ""
    size, name = unit(value)
    return f"{value / size:.4g} {name}"


def duration(seconds: float) -> str:
    """A duration of a microsecond or so: `1.2 us`, `25 ns`."""
    return f"{seconds * 1e6:.3g} us" if seconds >= 1e-6 else f"{seconds * 1e9:.3g} ns"


def ranged(
    value: float | None, low: float | None, high: float | None, form: str = "+.4g", unit: str = ""
) -> str:
    """`2.00x (1.90 to 2.10)`: a value with its unit and the ends of its interval; an end that is not known is
    `?`. No number has an exponent."""
    most = max(abs(number or 0) for number in (value, low, high))
    if form.endswith("g") and most >= 10 ** int(form[-2]) - 0.5:
        form = f"{form.partition('.')[0]}.0f"
    texts = ["?" if number is None else f"{number:{form}}" for number in (value, low, high)]
    told = [] if value is None else [f"{texts[0]}{unit}"]
    if low is not None or high is not None:
        told.append(f"({texts[1]} to {texts[2]})")
    return " ".join(told)


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
