"""Requests at a rate: what was recorded of a real engine, and what the simulation says of it today."""

import json
from statistics import fmean

import numpy as np
import pytest

from tests.support.paths import ROOT
from tools.serve_at_rates import BATCHES, MOST, QUANTITIES, predicted

RECORDED = json.loads((ROOT / "results/epyc-zen4-2core/serving-rates/rates.json").read_text())
DECODE = np.interp(range(1, MOST + 1), BATCHES, list(RECORDED["decode_ms"].values())).tolist()
PREFILL = list(RECORDED["prefill_ms"].values())


@pytest.mark.parametrize("line", RECORDED["lines"], ids=lambda line: f"{line['rate']}-{line['burstiness']}")
def test_the_simulation_still_says_what_is_recorded(line):
    again = predicted(line["rate"], line["burstiness"], DECODE, PREFILL)
    for name in QUANTITIES:
        assert again[name] == pytest.approx(line["predicted"][name], rel=1e-3)


def test_it_is_off_by_what_the_notes_say():
    notes = (ROOT / "results/epyc-zen4-2core/serving-rates/NOTES.md").read_text()
    for name in QUANTITIES:
        pairs = [(line["predicted"][name], line["measured"][name]) for line in RECORDED["lines"]]
        off = fmean(abs(of[0] / fmean(seen) - 1) for of, seen in pairs)
        inside = sum(of[1] <= value <= of[2] for of, seen in pairs for value in seen)
        row = f"| {'tokens/s' if name == 'tok/s' else name} | {off:.0%} | {inside} of 12 |"
        assert row.replace("%", " %") in notes
