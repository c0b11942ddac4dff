"""Decomposition of profilers' traces: per-kernel and per-class time, steps, exposure.

`decompose(path)` is the contract; harness/serving/trace/result.py describes what it gives. numpy, no torch.
"""

from harness.serving.trace.decompose import decompose
from harness.serving.trace.result import ClassTime, KernelTime, PerStep, Times, Trace, TraceStep

__all__ = ["ClassTime", "KernelTime", "PerStep", "Times", "Trace", "TraceStep", "decompose"]
