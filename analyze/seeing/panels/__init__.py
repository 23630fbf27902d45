"""The panels of a page: one picture or table per module."""
