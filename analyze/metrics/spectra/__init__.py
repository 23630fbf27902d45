"""Metrics of singular values and eigenvalues."""
