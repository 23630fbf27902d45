"""Comparisons of runs and steps by their representations."""
