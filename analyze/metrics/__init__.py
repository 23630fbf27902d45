"""The metrics: one subscriber a file, each a pure function and a thin final class."""
