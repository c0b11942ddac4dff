"""Arms of a live engine in mirrored pairs, and the effect between them."""
