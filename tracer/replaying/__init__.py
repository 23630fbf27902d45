"""Replays: the messages of a trace, published again on a bus."""
