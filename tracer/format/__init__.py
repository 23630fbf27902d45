"""What a trace is: its names, encodings, tables, checksums."""
