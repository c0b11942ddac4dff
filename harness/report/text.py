"""Numbers as text: times, ratios with their intervals, percentages; and plain tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tabulate import tabulate

WIDTH = 150  # of a line of text


def significant(value: float | None, digits: int = 3) -> str:
    """So many significant digits; empty for None."""
    return "" if value is None else f"{value:.{digits}g}"


def three_digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def microseconds(value: float | None) -> str:
    """Microseconds in three or four digits: `48.1 ms`, `312 us`; empty for None."""
    if value is None:
        return ""
    number, unit = (
        (value / 1e6, "s") if value >= 1e6 else (value / 1e3, "ms") if value >= 1e3 else (value, "us")
    )
    return f"{number:.4g} {unit}"


def microsecond_interval(low: float | None, high: float | None) -> str:
    """`310 us..315 us`; empty where an end is missing."""
    return f"{microseconds(low)}..{microseconds(high)}" if low and high else ""


def duration(seconds: float) -> str:
    """Of a clock's step or reading: `1.2 us`, `25 ns`."""
    return f"{seconds * 1e6:.3g} us" if seconds >= 1e-6 else f"{seconds * 1e9:.3g} ns"


def percent(value: float | None, digits: int = 1) -> str:
    """A share of 1 as `12.3%`; empty for None."""
    return "" if value is None else f"{value:.{digits}%}"


def interval(value: float, low: float, high: float, form: str = ".2f", unit: str = "") -> str:
    """`2.00x (1.90..2.10)`: all in the format, the value with the unit."""
    return f"{value:{form}}{unit} ({low:{form}}..{high:{form}})"


def ratio(value: float | None, low: float | None = None, high: float | None = None, digits: int = 3) -> str:
    """`1.234x (1.200..1.268)`; without the interval where an end is missing, `?` without a ratio."""
    if value is None:
        return "?"
    if low is None or high is None:
        return f"{value:.{digits}f}x"
    return interval(value, low, high, f".{digits}f", "x")


def extent(values: Iterable[float | None], digits: int = 3) -> str:
    """The least and the largest, `12-48`, or the one value that all have; None is left out."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = significant(min(known), digits), significant(max(known), digits)
    return low if low == high else f"{low}-{high}"


def table(
    rows: Sequence[Sequence[object]],
    headers: Sequence[str],
    right: Sequence[str] = (),
    widths: Mapping[str, int] | None = None,
    style: str = "simple",
) -> str:
    """Cells stand as they are given.

    right:  headers of columns that are aligned to the right
    widths: by header, in characters: longer cells are broken into lines
    style:  of tabulate; `github` for markdown
    """
    alignment = ["right" if header in right else "left" for header in headers] if rows else None
    limits = [widths.get(header) for header in headers] if widths else None
    return tabulate(rows, headers, style, disable_numparse=True, colalign=alignment, maxcolwidths=limits)


def filled_columns(
    rows: Sequence[Sequence[object]], headers: Sequence[str]
) -> tuple[list[list[object]], list[str]]:
    """Rows and headers without the columns in which no row has anything."""
    filled = [i for i in range(len(headers)) if any(str(row[i]) for row in rows)]
    return [[row[i] for i in filled] for row in rows], [headers[i] for i in filled]
