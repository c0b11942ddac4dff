"""Pure numbers, no torch: what a model and a serving workload ask of the ops."""
