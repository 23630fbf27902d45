"""Traces as directories in the Zarr v3 format, which any Zarr library reads.

Arrays are sharded and checksummed. A shard is a file that begins with an index of fixed size, followed by chunks
(`shards`). `writer` and `reader` hold what directories and object stores share, `writing` and `reading` what is special
to directories. `store` creates and opens stores.
"""
