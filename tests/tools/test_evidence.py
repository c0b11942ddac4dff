"""What is said of the suite's own kernels is what runs and stored configurations show."""

from __future__ import annotations

import json

from harness.catalogue.evidence import KINDS
from harness.paths import ROOT
from tools import evidence


def test_the_stored_table_is_that_of_the_records():
    assert evidence.read()["kernels"] == evidence.gathered(), "python -m tools.evidence makes it anew"


def test_the_document_has_the_stored_table():
    assert evidence.table() in (ROOT / "docs" / "compiling-and-tuning.md").read_text()


def test_lists_have_it(here):
    rows = json.loads(here("list", "impls", "--json", "-").stdout)
    own = {row["implementation"]: row["evidence"] for row in rows if row["evidence"]}
    assert own == evidence.read()["kernels"]
    assert {kind for at in own.values() for kinds in at.values() for kind in kinds} <= set(KINDS)
