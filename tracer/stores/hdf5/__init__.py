"""Traces in one file of the HDF5 format, which any HDF5 library reads."""
