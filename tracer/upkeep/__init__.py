"""Verifies, recovers and converts traces."""
