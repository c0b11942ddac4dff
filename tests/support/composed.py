from kernels.op import Prepared


def innermost(call: Prepared) -> Prepared:
    """The call of the implementation itself, without the steps that were composed before it."""
    while call.inner:
        call = call.inner
    return call
