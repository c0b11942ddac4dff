"""From times of kernels to a decision: which flags and variables an engine is to be launched with."""
