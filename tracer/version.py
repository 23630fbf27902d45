"""The version of this software, which traces and converted copies name."""

__version__ = "0.1.0"
