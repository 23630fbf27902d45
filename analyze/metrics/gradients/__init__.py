"""Metrics of gradients and updates."""
