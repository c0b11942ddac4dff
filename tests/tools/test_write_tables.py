"""The evidence for the suite's own kernels is that of recorded runs and stored configurations."""

import json

from harness.catalogue.architectures import KINDS
from tools import write_tables as tables


def test_the_stored_table_is_that_of_the_records():
    assert tables.read()["kernels"] == tables.evidence(), "python -m tools.write_tables makes it anew"


def test_documents_have_the_stored_tables():
    for page, made in ((tables.TUNING, tables.with_evidence), (tables.ENGINES, tables.with_engines)):
        assert made(page.read_text()) == page.read_text(), "python -m tools.write_tables writes them"


def test_lists_have_it(here):
    rows = json.loads(here("list", "impls", "--json", "-").stdout)
    own = {row["implementation"]: row["evidence"] for row in rows if row["evidence"]}
    assert own == tables.read()["kernels"]
    assert {kind for at in own.values() for kinds in at.values() for kind in kinds} <= set(KINDS)
