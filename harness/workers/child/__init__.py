"""What workers serve, each as `module:Class`, for the parent to name without importing it."""

BENCH = "harness.workers.child.bench:Bench"
JUDGE = "harness.workers.child.judge:Judge"
METER = "harness.workers.child.meter:Meter"
TABLES = "harness.workers.child.tables:Tables"
