"""Numbers as text."""

from __future__ import annotations

import pytest

from harness.report import text


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, ""), (0.5, "0.5 us"), (312.44, "312.4 us"), (48100, "48.1 ms"), (2.5e6, "2.5 s")],
)
def test_microseconds_are_given_in_the_unit_that_reads_best(value, wanted):
    assert text.microseconds(value) == wanted


@pytest.mark.parametrize(
    ("ratio", "wanted"),
    [
        ((None,), "?"),
        ((1.2345,), "1.234x"),
        ((1.5, 1.4, None), "1.500x"),
        ((1.5, 1.4, 1.6), "1.500x (1.400..1.600)"),
        ((1.5, 1.4, 1.6, 1), "1.5x (1.4..1.6)"),
    ],
)
def test_a_ratio_stands_with_its_interval(ratio, wanted):
    assert text.ratio(*ratio) == wanted


def test_an_interval_needs_both_ends():
    assert text.microsecond_interval(310, 315) == "310 us..315 us"
    assert text.microsecond_interval(None, 315) == ""


def test_an_extent_is_one_number_where_all_are_alike():
    assert text.extent([3, None, 3.0001]) == "3"
    assert text.extent([12, 48]) == "12-48"
    assert text.extent([None]) == ""


def test_columns_without_anything_are_left_out():
    rows, headers = text.filled_columns([["a", "", 1], ["b", "", ""]], ["name", "note", "count"])
    assert (rows, headers) == ([["a", 1], ["b", ""]], ["name", "count"])
    assert text.table(rows, headers, right=["count"]).splitlines()[-1].startswith("b")
