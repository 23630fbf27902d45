"""Traces in the Zarr v3 format, which any Zarr library reads.

Arrays are sharded and checksummed. A shard is a file that begins with an index of fixed size, followed by chunks
(`layout`). `writing` and `reading` are the same wherever the files lie: `files` says what they ask of a place, which is
a folder (`on_disk`) or an object store (`on_objects`). `store` creates and opens stores.
"""
