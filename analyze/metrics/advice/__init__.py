"""Metrics that advise: which layers to freeze, and which learning rate to take."""
