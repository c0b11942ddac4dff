"""This computer: what it is, its control groups and CPU threads, and what disturbs a measurement."""
