"""Engine and client processes: launched, guarded, ended."""
