"""Fields of files from outside: what counts as a number, what is left out, what stands in nested objects."""

from __future__ import annotations

import pytest

from harness.serving.clients.fields import Fields


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234.5", 1234.5), ("66,194.80", 66194.8), ("1234", 1234), (" 7. ", 7), (".5", 0.5), ("1e3", 1000)],
)
def test_a_number_in_text(text, value):
    row = Fields("here", {"a": text}, as_text=True)
    assert row.number("a") == value
    assert not row.findings


@pytest.mark.parametrize(
    "text", ["1.234,5", "1,5", "12,34", "1_000", ".", "e5", "٣", "12 ms", "64/64", "nan", "0x10"]
)
def test_no_number_in_text_is_never_read_as_one(text):
    row = Fields("here", {"a": text}, as_text=True)
    assert row.number("a") is None
    assert [one.rule for one in row.findings] == ["unreadable"]


def test_infinity_where_it_means_something():
    row = Fields("here", {"rate": "inf", "other": "inf", "word": "infinite"})
    assert row.number("rate", infinite=0.0) == 0.0
    assert row.number("other") is None
    assert row.number("word", infinite=0.0) is None
    assert len(row.findings) == 2


def test_counts():
    row = Fields("here", {"a": [1, 2.0], "b": [1, 2.5], "c": [-1], "d": "x"})
    assert row.counts("a") == (1, 2)
    assert row.counts("missing") == row.counts("b") == row.counts("c") == row.counts("d") == ()
    assert len(row.findings) == 3


def test_objects_inside_share_the_findings_and_the_rest():
    row = Fields("here", {"a": {"x": "no", "kept": 1, "b": {"y": 2, "z": 3}}, "flat": 4, "list": [1]})
    inner = row.inside("a")
    assert inner.number("x") is None
    assert inner.inside("b").number("y") == 2
    assert row.inside("missing").number("x") is None
    assert row.inside("list").number("x") is None
    assert row.rest() == {"flat": 4, "a": {"kept": 1, "b": {"z": 3}}}
    assert [one.message for one in row.findings] == [
        "here: a: 'x' is \"no\", not a number; left out",
        "here: 'list' is [1], not an object; left out",
    ]
