"""Metrics that reduce the values of many messages to a few numbers."""
