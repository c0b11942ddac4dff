"""One decode step of one rank, rebuilt from the suite's implementations and timed whole."""
