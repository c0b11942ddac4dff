"""The account of a gain that vanished: what was predicted, what serving did, where the difference went."""
