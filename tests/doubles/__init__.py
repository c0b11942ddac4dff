"""What stands in for what tests cannot have: engines and clients, and libraries' kernels in numbers.

The numeric ones are of layouts that are easily got wrong, one for each. They read their arguments as the
library's source says it does, refuse what it refuses or would misread, say which file and version each fact
came from, and know nothing of the rows. What shows that one is right is that rows compute the reference's
answer with it (tests/kernels/test_computed_calls.py).
"""
