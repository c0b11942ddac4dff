"""Triton kernels compiled for GPUs that need not be here, and what each takes of its architecture."""
