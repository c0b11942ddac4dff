"""A page as one file of HTML that loads nothing; or its charts as SVG or PNG, drawn without a browser."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Sequence
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.errors import UsageError
from harness.files import explained, replace, write
from harness.page.document import Page
from harness.page.style import TEMPLATES, specification
from harness.paths import cache


def write_page(page: Page, target: str, source: str) -> None:
    """Writes the page as HTML; its last line says when and from what it was made. Raises UsageError."""
    at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    write(target, html(page, f"{at}, from {source}"))


def html(page: Page, created: str) -> str:
    """The page as a file of HTML, of which `created` is the last line."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True,
                              undefined=StrictUndefined, lstrip_blocks=True)  # fmt: skip
    # `tojson` escapes what could end a <script>.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    css, js = (Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    vega = Markup(bundle())
    template = environment.get_template("page.html.j2")
    return template.render(page=page, created=created, css=css, js=js, vega=vega, specification=specification)


def bundle() -> str:
    """The JavaScript that sets `window.vegaEmbed`. It is cached, because making it takes seconds."""
    path = cache() / "vega" / f"vl-convert-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with contextlib.suppress(OSError):
        replace(path, text)
    return text


def pictures(page: Page, folder: Path, png: bool = False, patterns: Sequence[str] = ()) -> list[Path]:
    """Writes the charts whose anchors match one of the patterns (as in the shell), or without patterns all,
    black on white, each to a file named by its anchor; returns the files. Raises UsageError where the folder
    cannot be written, or no chart matches."""
    charts = [chart for chart in page.charts() if chart.picture]
    asked = [c for c in charts if any(fnmatchcase(c.anchor, pattern) for pattern in patterns or ["*"])]
    if not asked:
        known = ", ".join(chart.anchor for chart in charts) or "none"
        raise UsageError(f"no chart is called {' or '.join(patterns) or 'anything'}; charts: {known}")
    files = [folder / f"{chart.anchor}.{'png' if png else 'svg'}" for chart in asked]
    with explained(f"cannot write {folder}"):
        for chart, file in zip(asked, files, strict=True):
            # A file needs a title, a background and a colour of text of its own. Charts are laid out for
            # Arial; the padding is for the fonts of readers, which may be a fifth wider.
            title = {"text": chart.title, "subtitle": [*textwrap.wrap(chart.about, 90), ""]}
            padding = {"left": 40, "right": 40, "top": 12, "bottom": 12}
            drawn = specification(chart) | {"background": "white", "padding": padding, "title": title}
            drawn["config"] |= {"font": "Arial, sans-serif"}
            text = json.dumps(drawn).replace("currentColor", "#222222")
            if png:
                replace(file, vl_convert.vegalite_to_png(text, scale=2.0))
            else:
                replace(file, vl_convert.vegalite_to_svg(text) + "\n")
    return files
