"""A real serving engine: launched, loaded, observed."""
