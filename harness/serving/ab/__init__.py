"""A/B of a serving engine: does a variable, a flag or an image change this server, and by how much."""
