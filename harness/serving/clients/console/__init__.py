"""What load generators print on a terminal."""
