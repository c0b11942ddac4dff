"""Tolerances of the rules: how far apart numbers may be, and when an equation need not hold."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from harness.files import read_toml
from harness.serving.schema import Finding, ServingRun, Severity

TEXTS: dict[str, dict[str, str]] = read_toml(Path(__file__).with_name("texts.toml"))
EXACT = 1e-3  # relative: of numbers that one program computed from the same numbers
MARGIN = 0.01  # relative: by which two clocks of one run may differ
FASTEST_STEP_MS = 0.1  # a bound: a client in Python sees no faster decode step or first token
WAITS = ("client_queue_time", "schedule_delay")  # waits in the client: nearly 0 ms, or long in bursts
LIKE = 0.02  # relative: how near a ratio must be to a factor that `hint` knows


def rounding(*values: float) -> float:
    """Half of the finest decimal place of values of one kind; a value may lack zeros at its end."""
    places = [-int(Decimal(f"{value:.12g}").as_tuple().exponent) for value in values if value]
    return 0.5 * 10.0 ** -max([0, *places])


def apart(stated: float, expected: float, *inputs: float) -> float:
    """How far they differ relative to `expected`, beyond what rounding of `stated` and `inputs` explains."""
    if expected == 0:
        return 0.0 if stated == 0 else float("inf")
    allowed = rounding(stated) / abs(expected) + sum(rounding(n) / abs(n) for n in inputs if n)
    return max(0.0, abs(stated / expected - 1) - allowed)


def found(rule: str, severity: Severity, text: str, **values: Any) -> Finding:
    """A finding of a rule, with one of its texts (texts.toml) and these values."""
    message = TEXTS[rule][text].format(**values)
    # `1.2e+03` becomes `1200`.
    message = re.sub(r"\b\d(\.\d+)?e\+\d\d\b", lambda number: f"{float(number[0]):.0f}", message)
    return Finding(rule=rule, severity=severity, message=message)


def misfit(run: ServingRun, rule: str, severity: Severity, text: str, **values: Any) -> Finding:
    """A finding about numbers that do not fit each other over the whole run. If the client leaves out a
    warm-up or cool-down, its numbers are of a window, and need not fit: it is a note with that reason."""
    finding = found(rule, severity, text, **values)
    ends = ((run.workload.warmup_s, "warm-up"), (run.workload.cooldown_s, "cool-down"))
    cut = " and ".join(f"{seconds:g} s of {name}" for seconds, name in ends if seconds)
    if not cut:
        return finding
    message = f"{finding.message}; the client leaves {cut} out, so its numbers are of a window"
    return finding.model_copy(update={"severity": "note", "message": message})


def hint(run: ServingRun, ratio: float) -> str:
    """What a factor between two numbers that should be equal suggests."""
    larger = max(ratio, 1 / ratio) if ratio > 0 else 0.0
    known = {
        1000.0: "a thousand: s for ms, or k for one?",
        1e6: "a million: s for us?",
        float(run.gpus or 0): "the number of GPUs: is one of them a single GPU's?",
        float(run.nodes or 0): "the number of nodes: is one of them a single node's?",
    }
    near = (text for factor, text in known.items() if factor > 1 and abs(larger / factor - 1) < LIKE)
    return next((f" (off by {text})" for text in near), "")
