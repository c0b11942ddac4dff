"""Whether the check catches what is wrong and accepts what is right: kernels of each op in plain torch, some
with the arithmetic of a library, others with a bug."""
