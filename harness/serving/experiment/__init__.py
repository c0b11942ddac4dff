"""Experiments as files: what swaps of kernels change in a serving run, predicted, written down, then seen."""
