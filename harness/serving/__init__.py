"""What a kernel is worth in a serving run: results of clients, comparisons, traces, the model, the ledger.
Nothing here imports torch."""

from harness.serving.clients.load import load
from harness.serving.schema import Finding, Metric, ServingRun

__all__ = ["Finding", "Metric", "ServingRun", "load"]
