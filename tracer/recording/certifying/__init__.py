"""Checks that recording does not change a training, and rehearses recordings."""
