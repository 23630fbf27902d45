"""Traces checked, saved and converted."""
