"""The parts of a page that shows a run: one picture or table a file."""
