"""Times of kernels at a size: from tables, own runs or data sheets."""
