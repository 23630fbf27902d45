"""Answers as tables: gathered, printed, written."""
