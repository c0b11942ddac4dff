"""The arithmetic of kernels in plain torch: their roundings, and the order in which they compute."""
