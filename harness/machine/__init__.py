"""This computer: what it is, its CPU threads, and what disturbs a measurement on it."""
