"""Everything that depends on PyTorch's internals."""
