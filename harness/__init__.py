"""Checks and times kernels: docs/architecture.md lists the packages. `harness.bench` is in notebook.py."""


def __getattr__(name: str) -> object:
    """Imports `bench` when it is first asked for, because most commands do not need it."""
    if name != "bench":
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    from harness.notebook import bench

    return bench
