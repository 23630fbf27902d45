"""How a recording begins, writes and ends."""
