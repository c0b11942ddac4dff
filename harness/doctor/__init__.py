"""The state of this machine as a place to measure on, and what would improve it."""
