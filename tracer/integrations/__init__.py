"""Callbacks for training libraries, a module for each; importing `tracer` imports none of them."""
