"""HDF5 traces on object stores are found and opened here; they are only read."""

from __future__ import annotations

from contextlib import closing

from tracer.stores.hdf5.reading import Hdf5ReadStore
from tracer.stores.hdf5.store import open_file
from tracer.stores.locations import Url, beside
from tracer.stores.objects.client import Objects
from tracer.stores.objects.file import ObjectFile


def open(url: Url, *, damaged: bool = False) -> Hdf5ReadStore:
    """Open the HDF5 file at `url`; see `tracer.stores.opening.open_store`."""
    return open_file(ObjectFile(url), damaged=damaged)


def files(url: Url) -> list[Url]:
    """The files of a trace: one at `url`, if there is one, and those of other parts beside it."""
    if url.is_web:
        return [url]
    folder, _, _ = url.key.rpartition("/")
    with closing(Objects(Url(url.scheme, url.bucket, folder))) as objects:
        names = objects.names()
    found = [Url(url.scheme, url.bucket, f"{folder}/{name}" if folder else name) for name in beside(url, names)]
    return [url, *found] if url.name in names or not found else found


def blank(url: Url) -> bool:
    """Never; see `tracer.stores.opening.blank`."""
    return False
