"""Callbacks for training libraries, one module for each; importing `tracer` imports none of them."""
