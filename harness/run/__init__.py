"""One measurement, from its plan to its records."""
