"""Metrics that reduce the values of many messages."""
