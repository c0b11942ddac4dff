"""What must hold between the numbers of one run, by what it is about: one module each.

A rule takes a ServingRun and gives Findings. It says nothing where the run lacks what it compares.
"""
