"""Pictures in documents are those that `make pictures` makes now, from committed runs."""

import shlex
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.cli.recorded import report
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.browser"]

OUTSIDE = """() => {
  const all = document.querySelector("svg").getBoundingClientRect();
  return [...document.querySelectorAll("text")].filter((text) => {
    const at = text.getBoundingClientRect();
    return at.left < all.left || at.right > all.right || at.top < all.top || at.bottom > all.bottom;
  }).map((text) => text.textContent);
}"""
"""The texts that reach out of the picture."""
PICTURES = ROOT / "docs" / "pictures"


def drawn(file: Path) -> tuple[list[str], list[tuple[str, dict[str, str]]]]:
    """Texts, read or heard, and marks with all of their attributes. Where axes and legends stand, and so the
    size of the whole, is left out: that depends on how wide the machine's fonts are."""
    tree = ElementTree.parse(file)
    groups = [group for group in tree.iter() if " role-mark" in group.get("class", "")]
    marks = [(item.tag, item.attrib) for group in groups for item in group.iter()]
    texts = [text for element in tree.iter() for text in (element.text, element.get("aria-label")) if text]
    return texts, marks


def test_committed_pictures_are_what_make_makes(tmp_path):
    recipe = subprocess.check_output(["make", "--no-print-directory", "-n", "pictures"], cwd=ROOT, text=True)
    command, _, dark = recipe.replace("\\\n", " ").splitlines()[-3:]
    words = shlex.split(command)
    run, _, _, *patterns = words[words.index("report") + 1 :]
    to = ("--svg", str(tmp_path), "--png", str(tmp_path))
    report.main([str(ROOT / run), *to, *patterns], standalone_mode=False)
    (svg,), (png,) = tmp_path.glob("*.svg"), tmp_path.glob("*.png")
    width = float(ElementTree.parse(svg).getroot().attrib["width"])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert abs(int.from_bytes(png.read_bytes()[16:20], "big") - 2 * width) < 2
    assert "currentColor" not in svg.read_text()
    texts, marks = drawn(PICTURES / "mla-decode.svg")
    assert len(texts) > 10 and len(marks) > 10
    assert drawn(svg) == (texts, marks), "make pictures makes another picture"
    of_dark = subprocess.check_output(dark.partition(">")[0], shell=True, cwd=ROOT, text=True)
    assert of_dark == (PICTURES / "mla-decode-dark.svg").read_text() and of_dark.count("#0d1117") == 1


@pytest.mark.slow
@pytest.mark.parametrize("font", ["DejaVu Sans", "DejaVu Serif"])
def test_no_text_of_a_picture_is_cut_in_a_font_that_is_wider(browser, font):
    page = browser.new_page()
    for file in PICTURES.glob("*.svg"):
        page.set_content(file.read_text().replace("Arial, sans-serif", font))
        outside = page.evaluate(OUTSIDE)
        assert page.locator("text").count() > 10 and outside == []
