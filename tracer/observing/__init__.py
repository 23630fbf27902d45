"""PyTorch's training as messages; nothing here knows files."""
