"""Vega's JavaScript in one text: Vega, Vega-Lite and Vega-Embed."""

from __future__ import annotations

import contextlib
from importlib.metadata import version

import vl_convert

from harness.files import replace
from harness.paths import cache


def bundle() -> str:
    """Sets `window.vegaEmbed`. Kept in the user's cache, as putting it together takes seconds."""
    path = cache() / "vega" / f"vl-convert-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with contextlib.suppress(OSError):
        replace(path, text)
    return text
