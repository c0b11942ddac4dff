"""Triton kernels compiled for GPUs that need not be there, and what each takes of its architecture."""
