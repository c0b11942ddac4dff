"""A page as files: one file of HTML that loads nothing, with styles, scripts and the charts' data in it; or
its charts as SVG or PNG, drawn without a browser."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.errors import UsageError
from harness.files import replace
from harness.page.document import Chart, Page
from harness.page.style import TEMPLATES, specification
from harness.paths import cache

ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
"""Letters that could end a <script>, or a line of JavaScript. JSON has them in strings only."""
PIXELS = 2.0
"""The pixels of a PNG for each pixel of the chart."""


def html(page: Page, created: str) -> str:
    """The page as HTML.

    created: when and from what it was made, for its last line
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        page=page,
        created=created,
        css=_literal("page.css"),
        js=_literal("page.js"),
        vega=Markup(bundle()),
        data=data,
    )


def _literal(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def data(chart: Chart) -> Markup:
    """A chart's JSON, for a <script>."""
    text = json.dumps(specification(chart), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(ESCAPES))


def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one JavaScript text that sets `window.vegaEmbed`. It is kept in the
    user's cache, because making it takes seconds."""
    path = cache() / "vega" / f"vl-convert-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with contextlib.suppress(OSError):
        replace(path, text)
    return text


def pictures(page: Page, folder: Path, png: bool = False, patterns: Sequence[str] = ()) -> list[Path]:
    """Writes the charts, black on white, each named by its anchor; returns the files. Raises UsageError where
    the folder cannot be written, or no chart has a name that was asked for.

    patterns: of names, as in the shell; empty: all charts
    """
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in page.charts():
            asked = not patterns or any(fnmatchcase(chart.anchor, pattern) for pattern in patterns)
            specified = specification(chart) if asked else {}
            if not specified:
                continue
            # There is no page here to take the colour from.
            drawn = json.dumps(specified).replace("currentColor", "#222222")
            drawn = json.dumps(json.loads(drawn) | {"background": "white"})
            file = folder / f"{chart.anchor}.{'png' if png else 'svg'}"
            if png:
                file.write_bytes(vl_convert.vegalite_to_png(drawn, scale=PIXELS))
            else:
                replace(file, vl_convert.vegalite_to_svg(drawn) + "\n")
            files.append(file)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None
    if not files:
        known = ", ".join(chart.anchor for chart in page.charts() if chart.picture)
        raise UsageError(
            f"no chart is called {' or '.join(patterns) or 'anything'}; charts: {known or 'none'}"
        )
    return files
