"""A decision as text, JSON and a page, of the command, and at the end of a campaign."""

import json
import re
import sys
from pathlib import Path

import pytest

from harness.cli.campaign import conclude
from harness.decide.measured import read_measured
from harness.decide.text import decision_text, facts
from harness.decide.worth import decision_and_worth
from harness.page.decision import decision_page
from harness.page.html import html
from harness.report.terminal import plain_text
from harness.results.read import run_folders
from tests.support.decision_runs import PLACE, gemm, mla, moe, run
from tests.support.decision_worlds import ENGINE, set_rules
from tests.support.page_text import page_text

pytest_plugins = ["tests.support.browser"]
HERE = Path(__file__).parent
SPAN = "3201..3999"


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    set_rules(monkeypatch)


@pytest.fixture
def runs(tmp_path):
    """Of a model's suite: a choice that wins at some sizes, one that is not told, one that was not measured,
    a row for which there is no flag, and a case without the default."""
    few = {"mla.default": 20.0, "mla.a": 24.0, "mla.b": 20.0}
    many = {"mla.default": 100.0, "mla.a": 80.0, "mla.b": 100.0, "other.kernel": 50.0}
    attention = [(mla(1, PLACE, ctx=SPAN), few), (mla(64, PLACE, ctx=SPAN), many)]
    rest = [
        (gemm(64, PLACE), {"gemm.default": 10.0, "gemm.a": 9.0}),
        (moe(64, PLACE), {"moe.a": 300.0, "moe.b": 310.0}),
    ]
    run(tmp_path / "runs" / "mla", attention, suite="r1-tp8")
    run(tmp_path / "runs" / "rest", rest)
    return tmp_path / "runs"


def made(runs):
    return decision_and_worth(ENGINE, read_measured([str(runs)]), {}, {})


def without(folder: Path, text: str) -> str:
    return text.replace(str(folder), "FOLDER")


def test_as_text_and_page(runs, snapshot):
    decision, worth = made(runs)
    snapshot(
        HERE / "snapshots" / "decision.txt", without(runs, plain_text(decision_text(decision, worth), 110))
    )
    page = page_text(decision_page(decision, worth).sections)
    snapshot(HERE / "snapshots" / "page.txt", without(runs, page))


def test_as_json(here, runs, tmp_path):
    done = here("decide", "--engine", ENGINE, runs, "--json", "-")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found == json.loads(json.dumps(facts(*made(runs))))
    assert (found["flags"], found["variables"], found["files"]) == (
        {"attention-backend": "A"}, {}, {}
    )  # fmt: skip
    assert found["leave_it"] is False
    own = [choice for choice in found["taken"] if choice["op"] == "mla_decode"]
    assert [choice["runs"] for choice in own] == [[str(runs / "mla")]]
    assert own[0]["cases"]
    assert found["gain"]["low"] <= found["gain"]["ratio"] <= found["gain"]["high"]
    assert "vllm serve MODEL --tensor-parallel-size 8 --attention-backend A" in found["snippet"]
    assert found["worth"]["predicted"][0]["concurrency"] == 64
    assert [change["source"] for change in found["worth"]["changes"]] == [str(runs / "mla")]
    assert found["answer"].endswith("Only 16% of that time was measured.")
    assert any(line.startswith("fused_moe tokens=8192") for line in found["uncovered"])


def test_the_command_prints_it_and_writes_a_page(here, runs, tmp_path):
    page = tmp_path / "decision.html"
    done = here("decide", "--engine", ENGINE, runs, "--page", page)
    assert done.returncode == 0
    assert done.stdout.startswith("Use --attention-backend A: it saves ")
    assert done.stderr == f"written: {page}\n"
    assert "the fastest row that a flag can choose" in page.read_text()


def test_a_margin_above_the_gain_leaves_it(here, runs):
    done = here("decide", "--engine", ENGINE, runs, "--margin", "60")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert text.startswith("Leave it: --attention-backend A makes mla_decode 1.250x (1.250 to 1.250) faster,")
    assert "but saves 2.9% in all, less than 60.0%." in text
    assert "vllm serve" not in done.stdout
    assert "not told" not in done.stdout


def test_where_nothing_can_be_compared_it_says_what_to_measure(here, tmp_path):
    folder = run(tmp_path / "run", [(mla(64), {"mla.a": 80.0, "mla.b": 90.0})])
    done = here("decide", "--engine", ENGINE, folder)
    assert done.returncode == 3
    assert "--impl mla.default,mla.a,mla.b,mla.both" in done.stdout
    assert done.stderr == "error: nothing was compared: no choice has a time beside the default's\n"


@pytest.mark.parametrize(("words", "error"), [
    (["--workload", "isl=1"], "--workload needs osl, concurrency"),
    (["--cases", "c.json", "--workload", "isl=1,osl=1,concurrency=1"], "--cases has the calls of a load"),
    (["--with", "--tp=8"], "--with takes no --tp: here it is --tp N"),
    (["--tp", "7"], "tp=7 must divide the 2048 expert columns"),
    (["--cases", "none.json"], "cannot read none.json"),
    (["--margin", "nan"], "--margin takes per cent"),
    (["--drafts", "3"], "--drafts: a load does not tell how many are accepted"),
])  # fmt: skip
def test_mistakes(here, runs, words, error):
    done = here("decide", "--engine", ENGINE, runs, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert error in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_report_may_begin_with_the_decision(here, runs, tmp_path):
    page = tmp_path / "report.html"
    done = here("report", runs, "--decide", ENGINE, "-o", page)
    assert done.returncode == 0
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", page.read_text(), re.DOTALL)
    assert "the decision" in titles[0]
    assert len(titles) > 1


class Display:
    def __init__(self) -> None:
        self.printed: list[str] = []
        self.logged: list[str] = []
        self.print, self.log = self.printed.append, self.logged.append


def test_a_campaign_ends_with_the_decision_of_each_engine(runs):
    display = Display()
    conclude(display, runs, run_folders(runs))
    assert [line.partition(":")[0] for line in display.printed] == ["SGLang", "vLLM"]
    assert display.printed[1].startswith("vLLM: Use --attention-backend A")
    written = sorted(path.name for path in (runs / "decision").iterdir())
    assert written == ["sglang.html", "sglang.json", "vllm.html", "vllm.json"]


def test_a_node_that_cannot_draw_has_the_decision_without_a_page(runs, monkeypatch):
    for name in ("harness.page.decision", "altair"):
        monkeypatch.setitem(sys.modules, name, None)
    conclude(Display(), runs, run_folders(runs))
    assert sorted(path.name for path in (runs / "decision").iterdir()) == ["sglang.json", "vllm.json"]


def test_a_decision_that_cannot_be_written_does_not_lose_the_archive(runs, monkeypatch):
    def facts(decision: object, worth: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("harness.decide.text.facts", facts)
    display = Display()
    conclude(display, runs, run_folders(runs))
    assert display.logged == [f"no decision for {name}: ValueError: no" for name in ("SGLang", "vLLM")]


def test_a_campaign_without_times_ends_without_one(tmp_path):
    display = Display()
    broken = run(tmp_path / "run", [(mla(64), {"mla.default": 10.0})])
    (broken / "cells.jsonl").write_text("")
    conclude(display, tmp_path, [broken])
    assert display.printed == []
    assert len(display.logged) == 2
    assert not (tmp_path / "decision").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(opened, runs, tmp_path, scheme):
    file = tmp_path / "decision.html"
    page = decision_page(*made(runs))
    file.write_text(html(page, "Made by a test"))
    with opened(file, viewport={"width": 1600, "height": 900}, color_scheme=scheme) as view:
        view.drawn()
        assert view.errors == []
        assert [url for url in view.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        promised = {chart.anchor: chart.marks for chart in page.charts() if chart.picture}
        assert len(promised) >= 4
        assert {anchor: view.marks(anchor) for anchor in promised} == promised
        for width in (1600, 380):
            view.page.set_viewport_size({"width": width, "height": 900})
            assert view.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
