"""Traces in a directory of the Zarr v3 format, which any Zarr library reads."""
