"""Traces as a whole: written, read, selected, their parts put together."""
