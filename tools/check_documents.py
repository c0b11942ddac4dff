"""Checks results/published/serving against the texts of the documents, which are not in this tree.

PYTHONPATH=. python tools/check_documents.py FOLDER_WITH_THE_TEXTS
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.serving.published_documents import Configuration, PublishedDocument, documents

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def wrong(document: PublishedDocument, text: str) -> Iterator[str]:
    """A line for each quote, command or number of a run that the document's text does not contain."""
    flat = _flat(text)
    for claim in document.claims:
        if _flat(claim["quote"]) not in flat:
            yield f"{claim['id']}: no such sentence: {claim['quote']}"
    lines = {line.strip() for line in text.splitlines()}
    for one in document.configurations:
        yield from (f"{one.name}: no such line: {line}" for line in _verbatim(one) if line not in lines)
    numbers = {float(found.replace(",", "")) for found in NUMBER.findall(text)}
    for run in document.runs:
        totals = [value for value in run.totals.model_dump().values() if value is not None]
        reported = [metric.value for metric in run.metrics if not metric.derived]
        yield from (
            f"{run.id}: no such number: {one:g}" for one in (*totals, *reported) if one not in numbers
        )


def _verbatim(one: Configuration) -> Iterator[str]:
    """The lines that the document must contain. Our own headings, `# ` and the lengths of a run, are left
    out."""
    client = "" if one.client_source else one.client
    for text in (one.docker, one.server, client, one.task_file, *one.manifests.values()):
        for line in filter(None, map(str.strip, text.splitlines())):
            if not re.match(r"# \d+-\d+-", line):
                yield line


def _flat(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    texts = {
        hashlib.sha256(p.read_bytes()).hexdigest(): p for p in Path(sys.argv[1]).iterdir() if p.is_file()
    }
    bad = False
    for each in documents():
        path = texts.get(each.sha256)
        found = list(wrong(each, path.read_text())) if path else ["its text is not there"]
        bad |= bool(found)
        print(*(f"{each.id}: {one}" for one in found or ["holds"]), sep="\n")
    sys.exit(int(bad))
