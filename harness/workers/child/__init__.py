"""The worker process: prepares, times, judges, profiles."""
