"""How it is measured: plan, workers, blocks and rounds, check, journal, verdicts, tables. `harness.bench`
measures a function of a notebook or a script (notebook.py)."""


def __getattr__(name: str) -> object:
    """`bench` is imported when it is asked for."""
    if name != "bench":
        raise AttributeError("module 'harness' has no attribute " + repr(name))
    from harness.notebook import bench

    return bench
