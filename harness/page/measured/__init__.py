"""Charts of measured cases: what `run`, `toggle`, `tune` and `compare --revisions` record."""
