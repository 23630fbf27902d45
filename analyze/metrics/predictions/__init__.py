"""Metrics of predictions: accuracy and its relatives."""
