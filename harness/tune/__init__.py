"""Tuning: which configurations of a kernel are raced on a device, and where the winners are stored."""
