"""A page is made of whatever is recorded: many runs, broken ones, none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import vl_convert

from harness.cli.report import report
from harness.errors import UsageError
from harness.page.assemble import assemble
from harness.page.inputs import inputs
from harness.page.measured.op_section import MOST_CASES
from harness.page.pictures import pictures
from harness.page.specification import specification
from harness.paths import RESULTS
from tests.support.written_runs import altered, case, cell, finished, ranked, write

COMMITTED = RESULTS / "epyc-zen4-2core"
TWO = {"torch.sdpa": 200.0, "vllm.amx": 100.0}


def page_of(*names):
    return assemble(inputs(map(str, names)))


@pytest.mark.parametrize(
    "names",
    [
        ["mla_decode-smoke", "block_scale_gemm-smoke", "fused_moe-smoke", "mha_prefill-smoke"],
        ["compare"],
        ["serving/gauge"],
        ["toggle"],
        pytest.param(["engine"], marks=pytest.mark.slow),
    ],
)
def test_a_page_of_committed_runs_has_charts_that_can_be_drawn(names):
    page = page_of(*(COMMITTED / name for name in names))
    charts = list(page.charts())
    anchors = [chart.anchor for chart in charts]
    anchors += [row.anchor for chart in charts if chart.table for row in chart.table.rows if row.anchor]
    assert len(anchors) == len(set(anchors)), "a link would find two things"
    for chart in charts:
        assert chart.title and chart.reading.endswith(".") and (chart.picture or chart.table)
        if chart.picture:
            assert vl_convert.vegalite_to_vega(specification(chart))["marks"]


def test_the_headline_is_the_table_s():
    page = page_of(COMMITTED / "mla_decode-r1-tp8")
    assert "fastest: vllm.amx 33.4 ms, 1.94x vllm.vec (1.85 to 2.03)" in page.sections[0].headline


def test_two_runs_of_an_op_are_compared_and_told_apart(tmp_path):
    of = case()
    for name, factor in (("a", 1.0), ("b", 2.0)):
        times = {impl: us * factor for impl, us in TWO.items()}
        write(tmp_path / name, ranked(of, times), [of])
    page = page_of(tmp_path)
    (moved,) = [section for section in page.sections if section.title == "a to b"]
    assert moved.charts[0].marks == 2
    ranking = next(chart for chart in page.charts() if chart.anchor.startswith("ranking"))
    assert {row.cells[0] for row in ranking.table.rows} == {f"{impl} · {run}" for impl in TWO for run in "ab"}


def test_anchors_are_there_once_whatever_is_called_alike(tmp_path):
    of, other = case(), case(op="block_scale_gemm")
    for folder, op in (("a/run", of), ("b/run", of), ("c/run", other)):
        batches = [replace(op, sizes=op.sizes | {"batch": batch}) for batch in (1, 2)]
        write(tmp_path / folder, [r for b in batches for r in ranked(b, TWO)], batches)
    page = page_of(tmp_path)
    anchors = [chart.anchor for chart in page.charts()]
    assert len(anchors) == len(set(anchors))
    assert len(set(pictures(page, tmp_path / "svg"))) == sum(1 for c in page.charts() if c.picture)


def test_machines_tell_runs_apart(tmp_path):
    of = case()
    for name in "ab":
        folder = write(tmp_path / name, ranked(of, TWO), [of])
        machine = json.loads((folder / "run.json").read_text())["provenance"]["machine"]
        altered(folder, provenance={"machine": machine | {"device": f"Machine {name}"}})
    ranking = next(chart for chart in page_of(tmp_path).charts() if chart.anchor.startswith("ranking"))
    assert "vllm.amx · Machine a" in {row.cells[0] for row in ranking.table.rows}


def test_a_run_without_times_or_cases_says_so(tmp_path):
    of = case()
    nothing = write(tmp_path / "empty", [], [of])
    assert page_of(nothing).sections[0].headline == "No case was finished."
    refused = write(tmp_path / "refused", [cell(of, "aiter.asm", None), finished(of)], [of])
    assert "nothing has a time: 1 unsupported" in page_of(refused).sections[0].headline


def test_many_cases_have_one_page_that_says_what_it_leaves_out(tmp_path):
    cases = [case(batch) for batch in range(1, 101)]
    times = {f"torch.a{i}": 100.0 + i for i in range(3)}
    records = [record for of in cases for record in ranked(of, times)]
    (section, *_) = page_of(write(tmp_path / "run", records, cases)).sections
    assert len(section.sections) == MOST_CASES
    assert section.notes == [
        ("not shown", f"{100 - MOST_CASES} cases of less weight have no charts of their own")
    ]
    assert section.charts[0].marks == 100


@pytest.mark.parametrize(
    ("alteration", "complaint"),
    [
        ({"schema_version": 99}, "has schema 99; this version of the suite reads up to"),
        ({"schema_version": None}, "is not a run of this suite"),
        ({"cases": "none"}, "cannot read .*run.json: cases"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, alteration, complaint):
    of = case()
    folder = altered(write(tmp_path / "run", ranked(of, TWO), [of]), **alteration)
    with pytest.raises(UsageError, match=complaint) as refusal:
        page_of(folder)
    assert "\n" not in str(refusal.value)


def test_a_broken_line_is_named(tmp_path):
    of = case()
    folder = write(tmp_path / "run", ranked(of, TWO), [of])
    lines = (folder / "cells.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "cells.jsonl").write_bytes(b"".join([b"{nonsense}\n", *lines]))
    with pytest.raises(UsageError, match=r"cells\.jsonl.*1"):
        page_of(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "nonsense", '{"a": 1}', '{"workloads": [{"load": 1}]}', '{"compiles": [null]}']
)
def test_a_file_of_nothing_we_write_is_refused(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"x\.json"):
        page_of(file)


def test_a_file_that_is_no_record_stands_for_no_folder(tmp_path):
    of = case()
    write(tmp_path / "run", ranked(of, TWO), [of])
    (tmp_path / "README.md").write_text("beside runs")
    with pytest.raises(UsageError, match="is no record"):
        page_of(tmp_path / "README.md")


def test_pictures_are_files_named_by_their_anchors(tmp_path):
    page = page_of(COMMITTED / "mla_decode-smoke")
    files = pictures(page, tmp_path / "svg")
    assert [file.stem for file in files] == [chart.anchor for chart in page.charts() if chart.picture]
    for file in files:
        text = file.read_text()
        assert text.startswith("<svg") and "currentColor" not in text
    (first, *_) = pictures(page, tmp_path / "png", png=True)
    assert first.read_bytes().startswith(b"\x89PNG")


def test_the_command(cli, tmp_path):
    page = tmp_path / "page.html"
    done = cli("report", COMMITTED / "mla_decode-smoke", "-o", page)
    assert done.returncode == 0 and "charts in" in done.stderr and page.stat().st_size < 5e6
    assert "vllm.vec" in page.read_text()
    done = cli("report", tmp_path / "nowhere", "-o", page)
    assert done.returncode == 2 and done.stderr.startswith("error: no run at")


@pytest.mark.parametrize("option", ["-o", "--svg", "--png"])
def test_where_nothing_can_be_written_no_page_is_made(option, tmp_path):
    file = tmp_path / "a file"
    file.touch()
    where = file / "report.html" if option == "-o" else file
    broken = tmp_path / "broken.json"  # a page of it would be refused, too
    broken.write_text("nonsense")
    with pytest.raises(UsageError, match=r"^cannot write [^\n]*a file[^\n]*$"):
        report.main([str(broken), option, str(where)], standalone_mode=False)


def test_one_cell_is_a_page(tmp_path):
    of = case()
    page = page_of(write(tmp_path / "run", [cell(of, "torch.sdpa", 100.0), finished(of)], [of]))
    assert "nothing to compare it with" in page.sections[0].headline
    (field,) = page.sections[0].charts[0].table.rows
    assert "no second" in [getattr(value, "text", value) for value in field.cells]
    for chart in page.charts():
        if chart.picture:
            assert vl_convert.vegalite_to_vega(specification(chart))["marks"]
