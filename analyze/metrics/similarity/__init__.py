"""Metrics that compare the activations of layers."""
