"""Takes profilers' traces apart: time by kernel and op class, steps, and what is exposed. No torch."""

from harness.serving.trace.decompose import decompose
from harness.serving.trace.result import Trace

__all__ = ["Trace", "decompose"]
