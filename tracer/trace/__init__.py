"""Traces as a whole: writing, reading, selecting, and merging the parts of ranks and attempts."""
