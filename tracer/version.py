"""The version of this software, which is written into traces and converted copies."""

__version__ = "0.1.0"
