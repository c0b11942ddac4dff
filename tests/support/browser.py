"""A browser for tests of pages: Debian's Chromium under Playwright. A pytest plug-in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = Path("/usr/bin/chromium")
MISSING = f"needs Playwright (pip install playwright) and {CHROMIUM} (apt-get install chromium)"


# Not of the session: as long as Playwright is there, a loop runs in this thread, and asyncio.run fails.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Skips the test where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip(MISSING)
    if not CHROMIUM.exists():
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Opened:
    """A page in the browser, and what it did that a page must not: errors, and requests over a network."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def drawn(self) -> None:
        """Opens what is folded, and waits until every picture is drawn, or cannot be."""
        self.page.evaluate("document.querySelectorAll('.folded').forEach(one => { one.open = true; })")
        self.page.wait_for_function(
            "[...document.querySelectorAll('.picture')].every(p => p.querySelector('svg.marks, .warning'))"
        )

    def marks(self, anchor: str) -> int:
        """The marks of a chart that have a tooltip; Vega leaves each mark's item with its element."""
        return self.page.locator(f"[id='{anchor}'] svg.marks").evaluate(
            "svg => [...svg.querySelectorAll('*')].filter(e => e.__data__?.tooltip).length"
        )


@pytest.fixture(scope="module")
def opened(browser: Browser) -> Callable[..., contextlib.AbstractContextManager[Opened]]:
    """`with opened(file, anchor="a-row", color_scheme="dark") as view:`"""
    return functools.partial(open_file, browser)


@contextlib.contextmanager
def open_file(browser: Browser, file: Path, anchor: str = "", **options: Any) -> Iterator[Opened]:
    """options: of the browser's context, such as viewport and color_scheme"""
    context: BrowserContext = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(120_000)
    view = Opened(page)
    page.on("pageerror", lambda error: view.errors.append(str(error)))
    page.on("console", lambda message: view.errors.extend([message.text] * (message.type == "error")))
    page.on("request", lambda request: view.requests.append(request.url))
    page.goto(file.as_uri() + (f"#{anchor}" if anchor else ""))
    try:
        yield view
    finally:
        context.close()
