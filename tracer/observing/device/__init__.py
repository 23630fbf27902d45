"""Hashes and statistics of CUDA tensors, computed where the tensors are."""
