"""Traces in one file of the HDF5 format, which any HDF5 library reads.

HDF5 keeps the names and says where the chunks are. `writing` and `reading` move the bytes of large and of compressed
chunks without it. `opening` and `mended` get at files that are being written, or whose writer was killed; `torn` knows
how a kill leaves a block of HDF5's own metadata. `datasets` refuses what a trace never has. `store` makes and opens
them.
"""
