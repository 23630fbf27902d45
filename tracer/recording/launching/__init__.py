"""Runs unmodified training scripts and records them."""
