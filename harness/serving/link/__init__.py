"""Serving from kernel times: TPOT, TTFT and throughput, and what a change of a kernel is worth.

    link = harness.serving.link.link("h200", "sglang")
    harness.serving.link.predict(link, ClosedLoop(isl=1024, osl=1024, concurrency=32), [KernelChange(...)])

No torch; pandas only for own runs.
"""

from harness.serving.ledger.bounds import least_share, most_worth
from harness.serving.link.changes import parse_change
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.inverse import needs
from harness.serving.link.model import Link, link
from harness.serving.link.predictions import outlook, predict

__all__ = [
    "ClosedLoop",
    "Link",
    "least_share",
    "link",
    "most_worth",
    "needs",
    "outlook",
    "parse_change",
    "predict",
]
