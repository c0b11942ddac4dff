"""Numbers as text."""

import pytest

from harness.report import text
from harness.statistics.paired import Comparison


@pytest.mark.parametrize(("function", "arguments", "expected"), [
    (text.microseconds, (None,), ""),
    (text.microseconds, (0.5,), "0.5 us"),
    (text.microseconds, (312.44,), "312.4 us"),
    (text.microseconds, (48100,), "48.1 ms"),
    (text.microseconds, (2.5e6,), "2.5 s"),
    # The digits that are known, by half an interval.
    *((text.decimals, (half,), n) for half, n in ((40, 0), (6, 0), (3, 0), (2.4, 1), (1.15, 1))),
    *((text.decimals, (half,), n) for half, n in ((0.645, 1), (0.09, 2), (0.021, 3), (0.0, 3))),
    (text.value_and_interval, (33.41, 32.21, 34.61), ("33.4", "± 1.2")),
    (text.value_and_interval, (163.1, 154, 172), ("163", "± 9")),
    (text.value_and_interval, (334.7, 154.2, 726.6), ("335", "(154 to 727)")),
    (text.value_and_interval, (0.4, 0.1, 40.0), ("0.4", "(0.1 to 40.0)")),
    (text.value_and_interval, (12.3456, None, None), ("12.35", "")),
    (text.aligned, (["1.5x", "12x", "", "0.25x"],), [" 1.5x ", "12x   ", "", " 0.25x"]),
    (text.aligned, ([],), []),
    # One number where all are alike.
    *((text.extent, (of,), wanted) for of, wanted in (([3, None, 3.0001], "3"), ([12, 48], "12-48"))),
    (text.extent, ([None],), ""),
    *((text.duration, (seconds,), wanted) for seconds, wanted in ((1.2e-6, "1.2 us"), (2.5e-8, "25 ns"))),
    *((text.significant, (value,), wanted) for value, wanted in ((99.95, "100"), (1234.5, "1234"))),
    (text.significant, (None,), ""),
    (text.ranged, (2, 1.9, 2.1, ".2f", "x"), "2.00x (1.90 to 2.10)"),
    (text.ranged, (-14_100, -16_760.4, None), "-14100 (-16760 to ?)"),
    (text.ranged, (None, None, -1), "(? to -1)"),
    (text.ranged, (-999.4, -5_600, -3.21, "+.3g", " ms"), "-999 ms (-5600 to -3)"),
    (text.ranged, (-999.4, -99.94, -3.21, "+.3g"), "-999 (-99.9 to -3.21)"),
    (text.ranged, (None, None, None), ""),
    *((text.significant, (value, 4), wanted) for value, wanted in ((9999.4, "9999"), (12345.6, "12346"))),
])  # fmt: skip
def test_numbers_as_text(function, arguments, expected):
    assert function(*arguments) == expected


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((None, None, None), ("?", "")),
        ((1.2345, 1.2, None), ("1.23x", "")),
        ((1.2, 0.0, float("inf")), ("not known", "")),
        ((1.2, 0.0, 5e16), ("not known", "")),
        ((1.2, 0.01, 20.0), ("not known", "")),  # on both sides of 1
        ((9.0, 2.0, 50.0), ("9x", "(2 to 50)")),  # it is faster, however much
        ((1.9421, 1.854, 2.034), ("1.94x", "(1.85 to 2.03)")),
        ((0.09123, 0.0891, 0.0931), ("0.091x", "(0.089 to 0.093)")),
        ((10.971, 10.61, 11.34), ("11.0x", "(10.6 to 11.3)")),
    ],
)
def test_a_ratio_and_its_interval(ends, expected):
    assert text.ratio_and_interval(Comparison(*ends, "unclear")) == expected


def test_times_of_a_column_share_a_unit_where_that_reads_well():
    known = text.TimeInterval(3_072.0, 3_051.0, 3_093.0)
    without_ends = text.TimeInterval(163_000.0, None, None)
    header, cells = text.time_column([known, without_ends])
    assert (header, cells) == ("time, ms", ["  3.072 ± 0.021", "163"])
    short, long = text.TimeInterval(12.0, 11.0, 13.0), text.TimeInterval(2.5e6, 2.4e6, 2.6e6)
    header, cells = text.time_column([short, long])
    assert header == "time"
    assert [cell.split() for cell in cells] == [["12.0", "us", "±", "1.0"], ["2.50", "s", "±", "0.10"]]
