"""Traces on object stores: S3, and through obstore Google Cloud Storage, Azure and, for reading only, HTTP.

`client` makes the requests. Zarr traces are written and read by `writing` and `reading`; `store` makes and opens them.
HDF5 files are only read: `hdf5` opens them, and fetches blocks of them.
"""
