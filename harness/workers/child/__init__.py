"""What worker processes serve, as `module:Class`, so that the parent can name it without importing it."""

BENCH = "harness.workers.child.bench:Bench"
JUDGE = "harness.workers.child.judge:Judge"
METER = "harness.workers.child.meter:Meter"
