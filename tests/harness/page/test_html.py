"""Pages as HTML: nothing of a record's text becomes a part of the page, nothing is loaded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.page import html as renderer
from harness.page.document import Chart, Page, PageSection, Table, TableRow, TableValue
from harness.page.html import bundle, html
from harness.page.style import specification
from tests.support.synthetic_page import HOSTILE, LONG


@pytest.fixture(autouse=True)
def short_bundle(monkeypatch):
    """What is tested here is the page around it."""
    monkeypatch.setattr(renderer, "bundle", lambda: "/* Vega */")


def picture(name: str) -> Any:
    import altair as alt

    return alt.Chart({"values": [{"name": name, "time": 1.5}]}).mark_bar().encode(x="time:Q", y="name:N")


def page(text: str) -> Page:
    """Has the text wherever a page has any."""
    numbers = Table([text, "b"], [TableRow([text, TableValue(text, text)], anchor=text)], frozenset({"b"}))
    chart = Chart(f"chart-{text}", text, text, picture(text), numbers, 1)
    inner = PageSection(f"inner-{text}", text, f"{text}.")
    return Page(text, text, [PageSection(f"section-{text}", text, text, [chart], [(text, text)], [inner])])


def tables(rows: int, drawn: bool) -> Page:
    """Cells carry what they are sorted by."""
    first = [TableRow(["x", TableValue("1 µs", 1e-6)]), TableRow([TableValue("y", "last"), "-"])]
    more = [TableRow([str(i), ""]) for i in range(rows - 2)]
    numbers = Table(["a", "b"], [*first, *more], frozenset({"b"}))
    chart = Chart("c", "Chart", "Reading.", picture("x") if drawn else None, numbers)
    return Page("P", sections=[PageSection("s", "S", charts=[chart])])


def test_what_stands_on_a_page_is_as_committed(snapshot):
    """Of text that looks like HTML; without styles and scripts."""
    text = html(page(HOSTILE), HOSTILE)
    shown = re.sub(r"<(style|script)\b.*?</\1>", r"<\1 />", text, flags=re.DOTALL)
    shown += html(tables(2, drawn=False), "").partition("<main")[2]
    snapshot(Path(__file__).parent / "snapshots" / "html.txt", "\n".join(shown.splitlines()) + "\n")
    for rows, drawn, is_open in ((24, True, True), (25, True, False), (25, False, True)):
        assert ('<details class="numbers" open>' in html(tables(rows, drawn), "")) == is_open
    (data,) = re.findall(r"<script[^>]*>({.*?})</script>", text, flags=re.DOTALL)
    assert not re.search("[<>&\u2028\u2029]", data)
    assert json.loads(data) == specification(next(page(HOSTILE).charts())), "it comes back as it was"
    assert [[{"name": HOSTILE, "time": 1.5}]] == list(json.loads(data)["datasets"].values())


def test_pictures_keep_all_rows():
    import altair as alt
    import pandas as pd

    rows = pd.DataFrame({"time": range(LONG + 1)})
    drawing = alt.Chart(rows).mark_bar().encode(x="time:Q")
    result = specification(Chart("c", "Chart", "Reading.", drawing))
    assert [len(data) for data in result["datasets"].values()] == [LONG + 1]
    assert result["config"]["axis"]["labelColor"] == "currentColor"
    assert result["description"] == "Chart. Reading."


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
