"""Traces sent again through the bus."""
