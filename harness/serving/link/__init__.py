"""Serving from kernel times: TPOT, TTFT and throughput, and what a change of a kernel is worth."""
