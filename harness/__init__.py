"""Checks and times kernels, and keeps records: docs/architecture.md lists the packages. `harness.bench`
measures a function of a notebook or a script (notebook.py)."""


def __getattr__(name: str) -> object:
    """Imports `bench` when it is first asked for, because most commands do not need it."""
    if name != "bench":
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    from harness.notebook import bench

    return bench
