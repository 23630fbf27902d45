"""Traces as HDF5 files, which any HDF5 library reads.

HDF5 manages the names and the places of chunks. `writing` and `reading` move the bytes of large or compressed chunks
without it. `opening` and `mended` open files that are being written or whose writer was killed; `torn` repairs blocks
of HDF5 metadata that a kill left half written. `datasets` refuses content that a trace never has. `store` creates and
opens stores.
"""
