"""Lengths of sequences, and cases as text."""

import pytest

from shapes.case import Case, merge, parse
from shapes.lengths import parse_span, span_text, spread


@pytest.mark.parametrize("span", [(1, 1), (1, 2), (3201, 3999), (17, 65)])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 128])
def test_spread_has_the_same_sum_for_every_seed_and_hits_both_ends(span, count):
    lengths = [spread(span, count, seed) for seed in range(5)]
    assert len({sum(values) for values in lengths}) == 1
    assert all(sorted(values) == sorted(lengths[0]) and len(values) == count for values in lengths)
    assert all(span[0] <= value <= span[1] for value in lengths[0])
    if count > 1:
        assert (min(lengths[0]), max(lengths[0])) == span
    assert abs(sum(lengths[0]) / count - sum(span) / 2) <= 0.5


def test_spans_read_as_they_are_written():
    assert spread((1, 1000), 50, 3) == spread((1, 1000), 50, 3) != spread((1, 1000), 50, 4)
    assert parse_span("4096") == parse_span(4096) == (4096, 4096)
    assert parse_span(span_text(3201, 3999)) == (3201, 3999)
    assert span_text(7, 7) == "7" and spread((1, 2), 1, 0) == [2]
    assert (parse_span("0", least=0), parse_span("0..7", least=0)) == ((0, 0), (0, 7))
    with pytest.raises(ValueError, match=r"^length '-1' must be at least 0 and rise from low to high$"):
        parse_span("-1", least=0)


BAD_SPANS = ["", "a", "1..", "..5", "9..3", "0", "-4", "1..2..3", "3.5"]
BAD_CASES = ["", "batch", "batch=", "=4", "batch=1,,2", "batch=1 batch=2"]


@pytest.mark.parametrize(
    ("read", "text", "of"),
    [*((parse_span, text, "length") for text in BAD_SPANS), *((parse, text, "case") for text in BAD_CASES)],
)
def test_what_cannot_be_read_is_one_clear_line(read, text, of):
    with pytest.raises(ValueError, match=of) as error:
        read(text)
    assert "\n" not in str(error.value) and (of == "case" or repr(text) in str(error.value))


def test_cases_of_equal_key_merge_their_weights():
    a, b = Case("op", {"n": 1}, weight=0.25), Case("op", {"n": 2}, weight=0.5)
    assert [(case.text, case.weight) for case in merge([a, b, a])] == [("n=1", 0.5), ("n=2", 0.5)]
