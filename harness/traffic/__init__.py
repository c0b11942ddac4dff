"""Shapes of the ops from what engines and clients write: logs, traces, results."""
