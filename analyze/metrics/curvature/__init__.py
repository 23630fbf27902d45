"""How the loss bends: metrics of its second derivatives, which need the model and not only what it gave."""
