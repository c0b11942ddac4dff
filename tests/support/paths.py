"""Paths that tests share."""

from pathlib import Path

from harness.paths import ROOT

SUPPORT = Path(__file__).parent
DATA = ROOT / "tests" / "data"
SERVING_DATA = DATA / "serving"
