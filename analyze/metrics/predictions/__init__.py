"""Metrics of predictions: accuracy, calibration, churn, forgetting."""
