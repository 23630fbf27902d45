"""Metrics of the second derivatives of the loss; they need the model, not only its recorded outputs."""
