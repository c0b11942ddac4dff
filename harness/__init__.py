"""Checks and times kernels, and keeps records: docs/architecture.md lists the packages. `harness.bench`
measures a function of a notebook or a script (notebook.py)."""


def __getattr__(name: str) -> object:
    """Imports `bench` when it is first asked for, because most commands do not need it."""
    if name != "bench":
        # Every Python 3 has to read this file before it comes to __main__.py, so it has no f-string.
        raise AttributeError("module 'harness' has no attribute " + repr(name))
    from harness.notebook import bench

    return bench
