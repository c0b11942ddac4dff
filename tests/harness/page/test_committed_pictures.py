"""Pictures in documents are those that `make pictures` makes now, from committed runs."""

import shlex
import subprocess
from pathlib import Path
from xml.etree import ElementTree

from harness.cli.recorded import report
from tests.support.paths import ROOT

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
    words = shlex.split(recipe.replace("\\\n", " "))
    run, svg, _, *patterns = words[words.index("report") + 1 :]
    to = (svg, str(tmp_path / "svg"), "--png", str(tmp_path / "png"))
    report.main([str(ROOT / run), *to, *patterns], standalone_mode=False)
    committed = sorted(PICTURES.glob("*.svg"))
    for kind in ("svg", "png"):
        names = [f"{file.stem}.{kind}" for file in committed]
        assert sorted(file.name for file in (tmp_path / kind).iterdir()) == names
    for file in committed:
        png = (tmp_path / "png" / f"{file.stem}.png").read_bytes()
        width = float(ElementTree.parse(tmp_path / "svg" / file.name).getroot().attrib["width"])
        assert png.startswith(b"\x89PNG") and abs(int.from_bytes(png[16:20], "big") - 2 * width) < 2
        texts, marks = drawn(file)
        assert len(texts) > 10 and len(marks) > 10
        assert "currentColor" not in (tmp_path / "svg" / file.name).read_text()
        assert drawn(tmp_path / "svg" / file.name) == (texts, marks), (
            f"make pictures makes another {file.name}"
        )
