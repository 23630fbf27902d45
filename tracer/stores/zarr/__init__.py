"""Traces in a directory of the Zarr v3 format, which any Zarr library reads.

Arrays are sharded and checksummed: a shard is a file with an index of a fixed size at its start, then chunks. `shards`
says how; `writer` and `reader` are what a directory and an object store share; `writing` and `reading` are those of a
directory; `store` makes and opens them.
"""
