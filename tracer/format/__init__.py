"""The format of a trace: names, encodings, tables, checksums."""
