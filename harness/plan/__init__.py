"""What will be measured: cases, entries, settings, budget, memory. It needs no torch."""
