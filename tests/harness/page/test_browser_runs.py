"""Pages of committed results in a browser: every mark and number of the records is there."""

import pytest

from harness.page.assemble import assemble, inputs
from harness.page.document import anchor
from harness.page.html import html
from harness.paths import RESULTS
from tests.support.many_rows import amd_run
from tests.support.written_runs import case, ranked, write

pytest_plugins = ["tests.support.browser"]
pytestmark = pytest.mark.slow

COMMITTED = RESULTS / "epyc-zen4-2core"
PAGES = {
    "an op": ["mla_decode-r1-tp8"],
    "flags": ["toggle"],
    "two runs": ["compare"],
    "a ledger": ["serving/cpu-short"],
    "a forecast": [],
}
FORECAST = ("fused_moe=1.3x", "--concurrency", "4,16,64")
HOSTILE = "vllm.<script>throw 1</script>"


@pytest.mark.parametrize("name", PAGES)
def test_every_chart_is_drawn_with_its_marks_and_nothing_is_fetched(opened, cli, tmp_path, name):
    names = [str(COMMITTED / name) for name in PAGES[name]]
    if not names:
        names = [str(tmp_path / "link.json")]
        assert cli("serving", "what-if", *FORECAST, "--json", names[0]).returncode == 0
    page, file = assemble(inputs(names)), tmp_path / "report.html"
    file.write_text(html(page, "Made by a test"))
    assert file.stat().st_size < 5e6
    with opened(file, viewport={"width": 1600, "height": 900}) as view:
        view.drawn()
        assert view.errors == []
        assert [url for url in view.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        for select in view.page.get_by_role("combobox", name="Row").all():
            select.select_option(label="all")
        promised = {chart.anchor: chart.marks for chart in page.charts() if chart.picture}
        assert {anchor: view.marks(anchor) for anchor in promised} == promised
        for width in (1600, 380):
            view.page.set_viewport_size({"width": width, "height": 900})
            assert view.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_chosen_row_stands_beside_its_baseline_and_the_pair_alone(opened, tmp_path):
    of = case()
    times = {"torch.sdpa": 200.0, HOSTILE: 90.0, "vllm.vec": 150.0}
    file = tmp_path / "report.html"
    run = write(tmp_path / "run", ranked(of, times), [of])
    file.write_text(html(assemble(inputs([str(run)])), "Made by a test"))
    rounds = f"rounds-{anchor(of.key)}"
    with opened(file, anchor=anchor(of.key, "vllm.vec")) as view:
        view.drawn()
        assert view.page.locator("tr.marked").count() == 1
        select = view.page.locator(f"#{rounds}").get_by_role("combobox", name="Row")
        for name, strips in (("vllm.vec", 3), (HOSTILE, 3), ("all", 4)):
            select.select_option(label=name)
            ticks = 12 * strips
            view.page.wait_for_function(
                f"document.querySelectorAll('#{rounds} .mark-symbol path').length === {ticks}"
            )
            labels = view.page.locator(f"#{rounds} .role-axis-label text").all_text_contents()
            names = {label for label in labels if "." in label}
            assert names == ({*times} if name == "all" else {name, "torch.sdpa"}) | {"torch.sdpa (again)"}
        assert view.errors == []


def test_a_reader_chooses_rows_and_points_at_one(opened, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(html(assemble(inputs([str(amd_run(tmp_path / "run"))])), "Made by a test"))
    with opened(file) as view:
        view.drawn()
        figure = view.page.locator("figure[id^=time-over]")
        texts = figure.locator(".role-legend-label text")
        best = ["aiter.asm", "sglang.triton", "tilelang.split", "triton.split_kv", "vllm.triton"]
        assert texts.all_text_contents() == [*best, "vllm.triton_split"]
        figure.get_by_role("combobox", name="Rows").select_option(label="aiter")
        texts.get_by_text("aiter.ck").wait_for()
        assert len(texts.all_text_contents()) == 6
        figure.locator(".mark-symbol path").first.hover()
        shown = "all => all.map(one => one.getAttribute('opacity'))"
        assert sorted(figure.locator(".mark-symbol path[role]").evaluate_all(shown)) == (
            ["0.15"] * 40 + ["1"] * 8
        )
        figure.get_by_role("combobox", name="Axis").select_option(label="time, us")
        figure.locator(".role-axis-label").get_by_text("100 us").wait_for()
        assert view.errors == []


@pytest.mark.parametrize("width", [390, 1280])
def test_two_machines_on_one_page_can_be_read(opened, tmp_path, width):
    file = tmp_path / "report.html"
    runs = [str(RESULTS / gpu / "mla_decode-b64") for gpu in ("h100", "h200")]
    file.write_text(html(assemble(inputs(runs)), "Made by a test"))
    with opened(file, viewport={"width": width, "height": 900}) as view:
        view.drawn()
        notes = view.page.locator("dd").evaluate_all("all => all.map(one => one.clientWidth)")
        assert min(notes) > width / 2
        headlines = view.page.locator(".headline").all_text_contents()
        assert sum("87 %" in text for text in headlines) == 1
        ranking = view.page.locator("figure[id^=ranking]")
        assert ranking.bounding_box()["width"] > 0.9 * width
        assert ranking.locator(".role-axis-grid").first.bounding_box()["width"] > 0.25 * width
        h200, h100 = (one.bounding_box() for one in ranking.get_by_text("limit of", exact=False).all())
        assert h100["y"] + h100["height"] <= h200["y"] + 3 and h100["x"] + h100["width"] < width
        verdict, rows = (ranking.locator(of).bounding_box() for of in ("th:has-text('verdict')", ".rows"))
        assert width < 1280 or verdict["x"] + verdict["width"] < rows["x"] + rows["width"]
        heights = ranking.locator("tbody tr").evaluate_all("all => all.map(one => one.offsetHeight)")
        assert width < 1280 or max(heights) < 1.5 * min(heights), "a note out of sight makes no row high"
