"""Turns PyTorch training into messages; knows nothing of files."""
