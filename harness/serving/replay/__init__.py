"""One step of one rank, rebuilt from the suite's implementations in the engine's order and timed whole: it
gives what isolated kernels cannot, how much of a kernel is on the critical path and what its neighbours pay.
"""
