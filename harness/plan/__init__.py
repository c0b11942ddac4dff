"""What will be measured: cases, contenders, arms, budget, memory. Needs no torch."""
