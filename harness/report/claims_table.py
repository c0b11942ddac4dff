"""The table of headline claims (AITER) held against recorded runs, and what would measure them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.report.text import interval, table
from harness.results.claims import Claims, Ratio, Test, matches
from kernels.platform import Platform

NOTE = """
Each ratio is the largest of all recorded cases, with an interval wide enough for having looked for it. The
last column is no evidence for a claim: other kernels on other hardware, which show how large such factors
get, and where. What measures the claims, on their hardware, and which of its rows this machine can time:"""


def claims_table(claims: Claims, tests: Sequence[Test], platform: Platform) -> str:
    """platform: this machine."""
    headers = ["claim", "against", f"on {claims['device']}", "verdict", f"any kernel on {platform.arch}"]
    rows = [[f"{t.op} {t.factor:g}x", t.against, _ratio(t.claimed), t.verdict, _ratio(t.here)] for t in tests]
    head = f"{claims['source']}\nunknown: {claims['unknown']}\n"
    return "\n".join([head, table(rows, headers), NOTE, *_commands(tests, claims["kernels"])])


def _commands(tests: Sequence[Test], kernels: Sequence[str]) -> Iterator[str]:
    """For each op the run that would measure it, and what of it this machine can time."""
    for op in dict.fromkeys(t.op for t in tests):
        names = dict.fromkeys(name for t in tests if t.op == op for name in t.runs)
        ours = [name for name in names if matches(name, kernels)]
        rivals = [name for name in names if name not in ours]
        yield f"  python -m harness run --op {op} --suite r1-tp8 --budget 5m"
        yield f"    here: {', '.join(ours) or 'none of the claim'}, against {', '.join(rivals) or 'nothing'}"


def _ratio(largest: Ratio | None) -> str:
    if largest is None:
        return "not measured"
    sizes = largest.case.partition(" ")[2]
    text = interval(largest.ratio, largest.low, largest.high, ".2f", "x")
    return f"{text} {largest.a} over {largest.b}, {sizes}"
