"""Numbers of tensors: as exact NumPy arrays, and their sums, moments and extremes in one pass."""
