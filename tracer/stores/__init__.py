"""The storage below a trace: named arrays that grow by rows, and JSON attributes."""
