"""What a trace is kept in: named arrays that grow by rows, and JSON attributes, and nothing else."""
