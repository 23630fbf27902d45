"""Metrics that compare representations."""
