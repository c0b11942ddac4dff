"""What of a document's data does not stand in a text is told: one line for each."""

from harness.serving.published.documents import documents
from tools.check_documents import _verbatim, wrong


def test_what_does_not_stand_in_a_text_is_told():
    for each in documents():
        lines = [claim.quote for claim in each.claims]
        lines += [line for one in each.configurations for line in _verbatim(one)]
        numbers = [
            value for run in each.runs for value in run.totals.model_dump().values() if value is not None
        ]
        numbers += [metric.value for run in each.runs for metric in run.metrics if not metric.derived]
        assert list(wrong(each, "\n".join([*lines, *map(repr, numbers)]))) == []
        assert len(list(wrong(each, ""))) == len(lines) + len(numbers)
