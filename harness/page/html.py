"""A page as one file of HTML that loads nothing: styles, scripts and the charts' data are in it."""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.page.bundle import bundle
from harness.page.document import Chart, Page
from harness.page.specification import specification

TEMPLATES = Path(__file__).parent / "templates"

# What could end a <script>, or a line of JavaScript; in JSON such letters stand only in strings.
ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def html(page: Page, created: str) -> str:
    """created: when and from what, as the page's last line says it"""
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
        css=literal("page.css"),
        js=literal("page.js"),
        vega=Markup(bundle()),
        data=data,
    )


def literal(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def data(chart: Chart) -> Markup:
    """A chart's JSON for a <script>."""
    text = json.dumps(specification(chart), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(ESCAPES))
