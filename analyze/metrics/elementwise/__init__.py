"""Metrics of a tensor's elements: moments, norms, quantiles, histograms."""
