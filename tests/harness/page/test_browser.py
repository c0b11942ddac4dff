"""A page in a browser: its tables, links and themes work, for each reader. Charts: test_browser_runs.py."""

import csv
import re

import pytest

from harness.page.document import Chart, Page, PageSection
from harness.page.html import html
from tests.support.synthetic_page import COLUMNS, HOSTILE, LONG, records, synthetic

pytest_plugins = ["tests.support.browser"]
pytestmark = pytest.mark.slow

TIMES = "times-of-attention"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(synthetic(), "Made by a test"))
    return path


@pytest.fixture(scope="module")
def shared(opened, file):
    """For tests that leave the page as it was."""
    with opened(file, color_scheme="light") as view:
        view.drawn()
        yield view


def cells(page, anchor, column):
    """Texts of a column, of the rows that are shown."""
    rows = page.locator(f"#{anchor} tbody tr:not([hidden])")
    return rows.evaluate_all("(rows, column) => rows.map(row => row.cells[column].textContent)", column)


def contrast(page, selector):
    """WCAG's, of text with the page's paper."""

    def luminance(of, name):
        colour = page.locator(of).first.evaluate("(e, name) => getComputedStyle(e)[name]", name)
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]  # of `rgb(1, 2, 3)`
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    text, paper = luminance(selector, "color"), luminance("body", "backgroundColor")
    return (max(text, paper) + 0.05) / (min(text, paper) + 0.05)


def test_a_mark_says_its_record(shared):
    mark = shared.page.locator(f"#{TIMES} svg.marks .mark-symbol path").nth(3)
    mark.hover()
    tooltip = shared.page.locator("#vg-tooltip-element.visible")
    record = records(8)[3]
    assert tooltip.inner_text().split() == ["name", record["name"], "time", f"{record['time']:.2f}"]
    hostile = shared.page.locator(f"#{TIMES} svg.marks .mark-symbol path").nth(2)
    hostile.hover()
    assert HOSTILE.strip() in tooltip.inner_text()
    assert tooltip.locator("img, script").count() == 0


def test_a_table_sorts_by_number_with_mouse_and_keyboard_is_filtered_and_downloaded(opened, file):
    with opened(file) as view:
        sorted_filtered_downloaded(view.page)


def sorted_filtered_downloaded(page):
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to the content"
    page.locator("#long summary").click()
    heading = page.locator("#long thead th", has_text="time (µs)")
    ascending = [f"{time:,.1f}" for time in sorted(record["time"] for record in records(LONG))]
    heading.get_by_role("button").click()
    assert (heading.get_attribute("aria-sort"), cells(page, "long", 1)) == ("ascending", ascending)
    heading.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert (heading.get_attribute("aria-sort"), cells(page, "long", 1)) == ("descending", ascending[::-1])
    page.locator(f"#{TIMES} thead button").first.focus()
    page.keyboard.press("Space")
    assert cells(page, TIMES, 0)[1:4] == ["torch.kernel_0", "torch.kernel_4", "torch.kernel_6"]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    states = page.locator(f"#{TIMES} thead th").evaluate_all("all => all.map(e => e.ariaSort)")
    assert states == ["none", "ascending", "none"]

    field, told = page.locator("#long input"), page.locator("#long output")
    field.fill("VLLM surely kernel_499")
    names = cells(page, "long", 0)
    assert {*names} == {f"vllm.kernel_{i}" for i in (499, *range(4991, 5000, 2))} and len(names) == 6
    assert told.inner_text() == f"{len(names)} of {LONG} rows"
    field.fill("")
    assert len(cells(page, "long", 0)) == LONG
    assert told.inner_text() == ""

    with page.expect_download() as download:
        page.locator(f"#{TIMES} .download").click()
    assert download.value.suggested_filename == f"{TIMES}.csv"
    with download.value.path().open(encoding="utf-8", newline="") as text:
        table = list(csv.reader(text))
    expected = [[record["name"], str(record["time"]), 'faster, "surely"'] for record in records(8)]
    assert table[0] == list(COLUMNS) and sorted(table[1:]) == sorted(expected)


def test_a_link_opens_the_table_and_marks_its_row(opened, file):
    with opened(file, anchor="long-4321") as view:
        row = view.page.locator("#long-4321")
        view.drawn()
        assert "marked" in row.get_attribute("class")
        middle = "e => { const at = e.getBoundingClientRect(); return [at.x + 9, at.y + at.height / 2]; }"
        seen = "(e, [x, y]) => e.contains(document.elementFromPoint(x, y))"
        assert row.evaluate(seen, row.evaluate(middle)), "neither outside the window nor below the headings"
        colour = "e => getComputedStyle(e).backgroundColor"
        assert row.evaluate(colour) != view.page.locator("#long-4320").evaluate(colour)
        view.page.locator("#long input").fill("nothing has this")
        view.page.evaluate("location.hash = 'long-7'")
        view.page.locator("#long-7.marked").wait_for()
        assert view.page.locator(".marked").count() == 1
        assert view.errors == []


def test_themes_are_readable_and_the_choice_is_kept(opened, file):
    texts = ("body", ".subtitle", "nav a", "figcaption", "tbody .link", ".vega-actions a", "svg.marks text")
    with opened(file, color_scheme="dark") as view:
        view.drawn()
        dark = [contrast(view.page, text) for text in texts]
        view.page.get_by_role("button", name="Theme").click()
        light = [contrast(view.page, text) for text in texts]
        assert view.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        view.page.reload()
        assert view.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert min(dark + light) >= 4.5


def test_names_are_there_for_who_cannot_see(shared):
    page = shared.page
    for chart in synthetic().charts():
        assert page.get_by_role("figure", name=f"{chart.title}. {chart.reading}", exact=True).count() == 1
    picture = page.locator("[role=graphics-document]").first.get_attribute("aria-label")
    assert picture.startswith("Times of attention. A dot")
    tree = page.locator("body").aria_snapshot()
    for line in ('navigation "Contents"', "banner", "main", 'heading "Attention', 'region "Table of Wide"'):
        assert line in tree
    assert page.get_by_role("heading", level=1).count() == 1
    unnamed = [line for line in tree.splitlines() if re.search(r"- (button|link|searchbox|table)$", line)]
    assert unnamed == []


def test_a_chart_that_cannot_be_drawn_says_so_in_its_place(opened, tmp_path):
    page = synthetic()
    good = page.sections[0].charts[0]
    bad = Chart("bad", "Bad", "Reading.", good.picture.encode(x="time:Q").transform_calculate(x="no such ("))
    file = tmp_path / "bad.html"
    file.write_text(html(Page("Bad", sections=[PageSection("s", "S", charts=[bad, good])]), ""))
    with opened(file) as view:
        view.drawn()
        assert "cannot be drawn" in view.page.get_by_role("alert").inner_text()
        assert [error.startswith("bad cannot be drawn") for error in view.errors] == [True]
        assert view.marks(good.anchor) == good.marks


def test_paper_has_every_chart_and_table_and_without_javascript_the_tables_are_there(opened, file):
    with opened(file) as view:
        view.page.evaluate("window.requestIdleCallback = () => {}; dispatchEvent(new Event('beforeprint'))")
        assert view.page.evaluate("new Promise(done => setTimeout(done)).then(() => 0)") == 0
        assert view.page.locator("svg.marks").count() == 5
        assert view.page.locator(".numbers:not([open])").count() == 0
        view.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert view.page.locator(".numbers:not([open])").count() == 1
    with opened(file, java_script_enabled=False) as view:
        assert "The charts need JavaScript." in view.page.locator("noscript").text_content()
        assert view.page.get_by_role("button", name="Theme").count() == 0
        assert view.page.locator(f"#{TIMES} tbody tr").count() == 8
        assert view.errors == []
