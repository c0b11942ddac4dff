"""What a serving engine runs for a deployment, and what its libraries' tuned tables hold for it."""
