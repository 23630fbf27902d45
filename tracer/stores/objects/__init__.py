"""Traces on S3, Google Cloud Storage, Azure and, read-only, HTTP servers, all through obstore.

`client` makes the requests. `store` creates and opens Zarr traces, `writing` writes and `reading` reads them. `hdf5`
opens HDF5 files, which are read-only here, and fetches blocks of them.
"""
