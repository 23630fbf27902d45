"""All that is known of PyTorch's insides."""
