"""How it is measured: plan, workers, blocks and rounds, check, journal, verdicts, tables."""
