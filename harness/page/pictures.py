"""A page's charts as files: SVG or PNG, drawn without a browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import vl_convert

from harness.errors import UsageError
from harness.files import replace
from harness.page.document import Page
from harness.page.specification import specification

PIXELS = 2.0  # of a PNG, for each of the chart's


def pictures(page: Page, folder: Path, png: bool = False, patterns: Sequence[str] = ()) -> list[Path]:
    """Writes each of them, black on white, named by its anchor. Raises UsageError where the folder cannot be
    written, or none is as asked for.

    patterns: of names, as the shell has them; empty: all
    """
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in page.charts():
            asked = not patterns or any(fnmatchcase(chart.anchor, pattern) for pattern in patterns)
            if not asked or not (specified := specification(chart)):
                continue
            # What takes the page's colour has none of a page here.
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
