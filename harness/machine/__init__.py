"""This computer: what it is, its control groups, its CPU threads, and what disturbs a measurement."""
