"""Predictions of what a kernel is worth, held against observations."""
