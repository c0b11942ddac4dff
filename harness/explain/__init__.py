"""The account of a gain that vanished: what was predicted, what serving did, and where the difference went."""
