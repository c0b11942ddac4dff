"""A serving client run against a live engine."""
