"""How kernels compute, in plain torch: their roundings, and softmax block by block."""
