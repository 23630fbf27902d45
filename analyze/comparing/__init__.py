"""Runs and steps compared by their representations."""
