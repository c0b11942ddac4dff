"""A page is made of whatever is recorded: many runs, broken ones, none."""

import pytest

from harness.cli.recorded import report
from harness.errors import UsageError
from harness.page.assemble import MOST_CASES, assemble, inputs
from harness.paths import RESULTS
from tests.support.written_runs import case, ranked, write

COMMITTED = RESULTS / "epyc-zen4-2core"
TWO = {"torch.sdpa": 200.0, "vllm.amx": 100.0}


def page_of(*names):
    return assemble(inputs(map(str, names)))


def test_many_cases_have_one_page_that_says_what_it_leaves_out(tmp_path):
    cases = [case(batch) for batch in range(1, MOST_CASES + 4)]
    times = {f"torch.a{i}": 100.0 + i for i in range(3)}
    records = [record for of in cases for record in ranked(of, times)]
    (section, *_) = page_of(write(tmp_path / "run", records, cases)).sections
    assert len(section.sections) == MOST_CASES
    assert section.notes[0] == ("not shown", "3 cases of less weight have no charts of their own")
    assert len(section.charts[0].table.rows) == len(cases)


@pytest.mark.parametrize(("file", "text", "said"), [
    ("run/run.json", "{}", "is not a run of this suite"),
    ("run/cells.jsonl", "{nonsense}\n{}\n", r"cells\.jsonl, line 1"),
    ("README.md", "beside runs", "is no record"),
    *(("x.json", text, r"x\.json") for text in ("", "[]", '{"a": 1}', '{"compiles": [null]}')),
    ("x.json", '{"workloads": [{"load": 1}]}', r"x\.json"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_line(tmp_path, file, text, said):
    of = case()
    write(tmp_path / "run", ranked(of, TWO), [of])
    (tmp_path / file).write_text(text)
    with pytest.raises(UsageError, match=said) as refusal:
        page_of(tmp_path / ("run" if file.startswith("run/") else file))
    assert "\n" not in str(refusal.value)


def test_a_folder_stands_for_all_that_is_recorded_below_it_and_is_no_part_of_another(tmp_path):
    parts = ("", "of an experiment/")
    for file in (*(part + "a run/run.json" for part in parts), "of an experiment/experiment.json",
                 "an ab/ab.json", *(part + "ledger.jsonl" for part in parts)):  # fmt: skip
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    found = [
        [path.relative_to(tmp_path).as_posix() for path in of]
        for of in vars(inputs([str(tmp_path)])).values()
    ]
    assert found == [["a run"], ["an ab"], ["ledger.jsonl", "of an experiment/ledger.jsonl"], []]
    (tmp_path / "written").mkdir()
    (file := tmp_path / "written/link.json").touch()
    assert inputs([str(file.parent)]).documents == [file]


def test_the_command(here, tmp_path):
    page = tmp_path / "page.html"
    done = here("report", COMMITTED / "mla_decode-smoke", "-o", page)
    assert done.returncode == 0 and "charts in" in done.stderr and page.stat().st_size < 5e6
    assert "vllm.vec" in page.read_text()
    drawn = here("report", COMMITTED / "mla_decode-smoke", "--svg", tmp_path / "svg")
    charts = [chart.anchor for chart in page_of(COMMITTED / "mla_decode-smoke").charts() if chart.picture]
    assert drawn.returncode == 0
    assert sorted(file.stem for file in (tmp_path / "svg").iterdir()) == sorted(charts)


@pytest.mark.parametrize("option", ["-o", "--svg", "--png"])
def test_where_nothing_can_be_written_no_page_is_made(option, tmp_path):
    file = tmp_path / "a file"
    file.touch()
    where = file / "report.html" if option == "-o" else file
    broken = tmp_path / "broken.json"  # a page of it would be refused, too
    broken.write_text("nonsense")
    with pytest.raises(UsageError, match=r"^cannot write [^\n]*a file[^\n]*$"):
        report.main([str(broken), option, str(where)], standalone_mode=False)
