"""Metrics that advise: what to freeze, which learning rate."""
