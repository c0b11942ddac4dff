"""What will be measured: cases, entries, settings, budget, memory. This package imports no torch."""
