"""Known defects of libraries concern the sizes, versions and architectures that their issues tell of."""

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernels
from kernels import platform
from kernels.defects import DEFECTS, known_defects
from kernels.op import Implementation
from kernels.platform import named
from kernels.support import Support
from shapes.case import parse

MLA = "mla_decode"

FAULT = {"batch": 4, "ctx": "100", "heads": 64, "kv": "fp8"}


def row(op: str, name: str) -> Implementation:
    return next(i for i in kernels.implementations(op) if i.name == name)


def issues(monkeypatch, op: str, name: str, arch: str, version: str, **sizes: object) -> set[str]:
    monkeypatch.setattr(platform, "version", lambda module: version)
    read = kernels.OPS[op].sizes(sizes)
    return {defect.issue for defect in known_defects(row(op, name), read, arch)}


def cases() -> Iterator[tuple[str, ...]]:
    """The columns of each line of defects.txt, without comments."""
    for line in Path(__file__).with_name("defects.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            yield tuple(line.split(" | "))


CASES = list(cases())


@pytest.mark.parametrize(("issue", "op", "name", "arch", "version", "sizes"), CASES)
def test_what_an_issue_tells_of_is_known_and_no_more(monkeypatch, issue, op, name, arch, version, sizes):
    known = issues(monkeypatch, op, name, arch, version, **parse(sizes)[0])
    assert (issue.removeprefix("not ") in known) != issue.startswith("not ")


def test_every_entry_is_tried_and_names_rows_that_there_are():
    there = {defect.issue for defect in DEFECTS}
    assert {issue for issue, *_ in CASES} == there | {f"not {issue}" for issue in there}
    for defect in DEFECTS:
        assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", defect.issue)
        names = [i.name for i in kernels.implementations(defect.op)]
        assert all(fnmatch.filter(names, pattern) for pattern in defect.rows), defect.rows


def test_a_case_that_faults_is_refused_with_the_number(monkeypatch):
    op, place = kernels.OPS[MLA], named("rocm", "gfx942")
    case = op.case({**op.defaults("gfx942"), **FAULT})
    reason = "known: ROCm/aiter#4957, GPU fault in mla_a8w8_qh64_qseqlen1_gqaratio64_v3_ps"
    for version, support in (("0.1.20", Support(False, reason)), ("0.1.17", Support(True))):
        monkeypatch.setattr(platform, "version", lambda module, version=version: version)
        assert row(MLA, "aiter.asm_persistent").supports(case, place) == support
