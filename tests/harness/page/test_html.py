"""Pages as HTML: nothing of a record's text becomes a part of the page, nothing is loaded."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from harness.page import html as renderer
from harness.page.bundle import bundle
from harness.page.document import Chart, Page, PageSection, Table, TableRow, TableValue
from harness.page.html import html
from tests.support.synthetic_page import HOSTILE, LONG, synthetic


@pytest.fixture(autouse=True)
def short_bundle(monkeypatch):
    """What is tested here is the page around it."""
    monkeypatch.setattr(renderer, "bundle", lambda: "/* Vega */")


class Elements(HTMLParser):
    """All of a page, with the text of its scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def picture(name: str) -> Any:
    import altair as alt

    return alt.Chart({"values": [{"name": name, "time": 1.5}]}).mark_bar().encode(x="time:Q", y="name:N")


def page(text: str) -> Page:
    """Has the text wherever a page has any."""
    numbers = Table([text, "b"], [TableRow([text, TableValue(text, text)], anchor=text)], frozenset({"b"}))
    chart = Chart(f"chart-{text}", text, text, picture(text), numbers, 1)
    inner = PageSection(f"inner-{text}", text, text)
    return Page(text, text, [PageSection(f"section-{text}", text, text, [chart], [(text, text)], [inner])])


def test_text_of_records_is_only_text():
    from harness.page.specification import specification

    hostile, harmless = Elements(html(page(HOSTILE), HOSTILE)), Elements(html(page("x"), "x"))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    assert [sorted(attributes) for _, attributes in hostile.tags] == [
        sorted(attributes) for _, attributes in harmless.tags
    ]
    assert {"id": HOSTILE} in hostile.every("tr")
    text = next(script for script in hostile.scripts if script.startswith("{"))
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == specification(next(page(HOSTILE).charts()))
    assert [[{"name": HOSTILE, "time": 1.5}]] == list(json.loads(text)["datasets"].values())


def test_nothing_is_loaded():
    text = html(synthetic(), "now")
    assert text == html(synthetic(), "now")
    elements = Elements(text)
    for _, attributes in elements.tags:
        assert not {"src", "srcset", "data", "action", "poster"} & set(attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    assert not re.search(r"@import|url\(", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    addresses = set(re.findall(r"https?://[^\"\\]*", text))
    assert {re.sub(r"/v[\d.]+\.json", "", address) for address in addresses} == {
        "https://vega.github.io/schema/vega-lite"
    }, "a name, which nothing reads"


def test_cells_carry_what_they_are_sorted_by():
    numbers = Table(
        ["a", "b"],
        [TableRow(["x", TableValue("1 µs", 1e-6)]), TableRow([TableValue("y", "last"), "-"])],
        frozenset({"b"}),
    )
    chart = Chart("c", "Chart", "Reading.", None, numbers)
    text = html(Page("P", sections=[PageSection("s", "S", charts=[chart])]), "")
    assert '<tr><th scope=row>x</th><td class="n" data-number="1e-06">1 µs</td></tr>' in text
    assert '<tr><th scope=row data-text="last">y</th><td class="n">-</td></tr>' in text
    assert '<details class="numbers" open>' in text


@pytest.mark.parametrize(
    ("rows", "drawn", "is_open"), [(12, True, True), (13, True, False), (13, False, True)]
)
def test_long_tables_are_closed_beside_a_picture(rows, drawn, is_open):
    numbers = Table(["a"], [TableRow([str(i)]) for i in range(rows)])
    chart = Chart("c", "Chart", "Reading.", picture("x") if drawn else None, numbers)
    text = html(Page("P", sections=[PageSection("s", "S", charts=[chart])]), "")
    assert ("open" in Elements(text).every("details")[0]) == is_open


def test_pictures_keep_their_own_config_and_all_rows():
    import altair as alt
    import pandas as pd

    from harness.page.specification import merged, specification

    rows = pd.DataFrame({"time": range(LONG + 1)})
    drawing = alt.Chart(rows).mark_bar().encode(x="time:Q").configure_axis(labelLimit=7)
    result = specification(Chart("c", "Chart", "Reading.", drawing))
    assert [len(data) for data in result["datasets"].values()] == [LONG + 1]
    assert result["config"]["axis"]["labelLimit"] == 7
    assert result["config"]["axis"]["labelColor"] == "currentColor"
    assert result["description"] == "Chart. Reading."
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}
    with pytest.raises(alt.MaxRowsError):
        alt.Chart(rows).mark_bar().to_dict()


def test_vegas_script_is_kept(tmp_path, monkeypatch):
    import vl_convert

    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda snippet: calls.append(snippet) or "/* µ */")
    assert bundle() == bundle() == "/* µ */"
    assert len(calls) == 1
    (file,) = tmp_path.rglob("*.js")
    file.unlink()
    file.parent.chmod(0o500)
    file.mkdir()
    assert bundle() == "/* µ */", "also where it cannot be kept"
