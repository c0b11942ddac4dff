"""One step of one rank, rebuilt from the suite's implementations in the engine's order and timed whole: it
shows how much of a kernel's saving the step keeps, which kernels timed alone cannot show.
"""
