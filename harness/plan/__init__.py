"""What will be measured: cases, entries, settings, budget, memory. Needs no torch."""
