"""Hashes and statistics of CUDA tensors, computed on the device."""
