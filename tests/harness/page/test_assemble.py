"""A page is made of whatever is recorded: many runs, broken ones, none."""

import pytest

from harness.cli.recorded import report
from harness.errors import UsageError
from harness.page.assemble import MOST_CASES, MOST_INPUTS, assemble, inputs
from harness.page.style import specification
from harness.paths import RESULTS
from tests.support.many_rows import amd_run
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


def test_of_many_rows_the_best_of_each_provider_and_the_defaults_stand_first(tmp_path):
    page = page_of(amd_run(tmp_path / "run", rows=30))
    assert page.subtitle == "AMD Instinct MI300X, gfx942, 192 CPU cores, 2026-11-24, commit abcdef0"
    op, machine = page.sections
    cases = [section.title for section in op.sections]
    assert cases == [f"batch={batch} core" for batch in (1, 2, 4, 8, 16, 32, 64, 128)], "by size"
    assert all(section.folded and "unsupported" not in dict(section.notes) for section in op.sections)
    shared = dict(op.notes)
    assert shared["sizes"] == "all have ctx=3201..3999 heads=16 page=64 kv=bf16"
    assert "one case with a false verdict in 20; these are 8" in shared["verdicts"]
    assert op.notes.count(("unsupported", "needs gfx950: aiter.gluon")) == 1
    ranking = op.sections[-1].charts[0]
    (marks,) = (rows for rows in specification(ranking)["datasets"].values() if "shown" in rows[0])
    assert [mark["name"] for mark in marks if mark["shown"]] == [
        *("aiter.asm", "triton.split_kv", "vllm.triton_split", "vllm.triton"),
        *("sglang.triton", "tilelang.split"),
    ], "torch's are more than five times as slow; SGLang's default is AITER's best"
    labels = [mark["label"] for mark in marks if mark["default"] and mark["shown"]]
    assert labels == ["aiter.asm (sglang)", "vllm.triton (vllm)"], "of two launches the faster"
    assert "more than 5x the fastest: torch.sdpa (" in ranking.reading
    assert len(marks) == len(ranking.table.rows) == 30, "the table has all, and no row that cannot run"
    facts = {row.cells[1]: row.cells[2] for row in machine.charts[-1].table.rows}
    assert (facts["device_memory"], facts["last_level_cache"]) == ("192 GiB", "256 MiB")


@pytest.mark.parametrize(("race", "expected"), [
    (None, "fastest: vllm.amx 100.0 us, 2.000x torch.sdpa (1.980 to 2.020), 10 % of this machine's limit; "
           "1 more not measured."),
    ({"keep": 8, "folder": "."},
     "mla_decode batch=4 ctx=100 core: fastest: vllm.amx 100.0 us, 2.000x torch.sdpa (1.980 to 2.020), "
     "10 % of this machine's limit."),
])  # fmt: skip
def test_a_case_alone_is_said_once_and_a_race_is_not_summarised(tmp_path, race, expected):
    cases = [case(4), case(8)]
    one = page_of(write(tmp_path / "one", ranked(cases[0], TWO), cases, race=race)).sections[0]
    assert one.headline == expected
    records = [record for of in cases for record in ranked(of, TWO)]
    both = page_of(write(tmp_path / "both", records, cases, race=race)).sections[0]
    assert both.headline.startswith("" if race else "fastest in 2 of 2") and bool(race) == (not both.headline)


def test_a_page_of_many_records_begins_with_a_table_of_them(tmp_path):
    of = case()
    for number in range(MOST_INPUTS + 1):
        write(tmp_path / f"{number}/run", ranked(of, TWO), [of])
    told = []
    page = assemble(inputs([str(tmp_path)]), progress=told.append)
    index, *sections = page.sections
    assert page.title == "9 records" and told[8] == f"9 of 9 runs: {tmp_path}/8/run"
    (table,) = (chart.table for chart in index.charts)
    assert [row.link for row in table.rows] == [section.anchor for section in sections]
    assert [row.cells[1] for row in table.rows] == [section.headline for section in sections]
    assert all(
        section.folded and section.title == "mla_decode · A machine · 2026-11-24" for section in sections
    )
    assert not any(chart.title.startswith("Rounds") for chart in page.charts())
    few = page_of(*(tmp_path / f"{i}/run" for i in range(MOST_INPUTS)))
    assert any(chart.title.startswith("Rounds") for chart in few.charts())


@pytest.mark.parametrize(("file", "text", "said"), [
    ("run/run.json", "{}", "is not a run of this suite"),
    ("run/cells.jsonl", "{nonsense}\n{}\n", r"cells\.jsonl, line 1"),
    ("README.md", "beside runs", "nothing that report shows"),
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
    found = [(kind, path.relative_to(tmp_path).as_posix()) for kind, path in inputs([str(tmp_path)])]
    ledgers = [("ledger", "ledger.jsonl"), ("ledger", "of an experiment/ledger.jsonl")]
    assert found == [("run", "a run"), ("A/B", "an ab"), *ledgers]
    (tmp_path / "written").mkdir()
    (file := tmp_path / "written/link.json").touch()
    assert inputs([str(file.parent)]) == [("document", file)]


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
