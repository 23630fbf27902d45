"""Creates, finds, opens and removes Zarr traces on object stores."""

from __future__ import annotations

from contextlib import closing

from tracer.errors import TraceCorruptError, TraceExistsError, TraceFormatError, TraceNotFoundError
from tracer.format.names import PART
from tracer.stores.locations import Url
from tracer.stores.objects.client import Objects
from tracer.stores.objects.reading import ObjectReadStore
from tracer.stores.objects.writing import ObjectWriteStore
from tracer.stores.zarr.shards import WRITER, is_group


def create(url: Url, *, part: str | None = None, overwrite: bool = False, durable: bool = False) -> ObjectWriteStore:
    """Make a Zarr group at `url`; see `tracer.stores.opening.create_store`. Commits are durable in any case."""
    objects = Objects(url)
    try:
        if part is not None:
            if not overwrite and objects.listed(part):
                raise TraceExistsError.at(url / part)
            objects.delete(one.name for one in objects.listed(part))
        elif objects.any():
            if not overwrite:
                raise TraceExistsError.at(url)
            document = objects.document("")
            if document.get("node_type") != "group":
                raise TraceExistsError(f"{url} already exists, and is not a Zarr group that could be overwritten")
            objects.delete(one.name for one in objects.listed())
        return ObjectWriteStore(objects, part)
    except BaseException:
        objects.close()
        raise


def open(url: Url, *, damaged: bool = False) -> ObjectReadStore:
    """Open the Zarr group at `url`; see `tracer.stores.opening.open_store`."""
    objects = Objects(url)
    try:
        document = objects.document("")
        if not is_group(document):
            if not document and not objects.any():
                raise TraceNotFoundError(f"there is no trace at {url}")
            # HTTP servers list no objects
            names = [] if url.is_web else [one.name for one in objects.listed()]
            if not (damaged and any(name.startswith("rank") for name in names)):
                if any(PART.fullmatch(name.partition("/")[0]) for name in names):
                    raise TraceCorruptError(
                        f"{url}: the zarr.json of the root is not that of a group, but there are parts of a trace"
                    )
                raise TraceFormatError(f"{url} is not a Zarr group of format 3: it has no zarr.json that says so")
        store = ObjectReadStore(objects, document)
        if damaged:
            store.thorough = True
            store.problems += store.damaged_groups()
        return store
    except BaseException:
        objects.close()
        raise


def files(url: Url) -> list[Url]:
    """The URL itself: all parts of a trace are below it."""
    return [url]


def blank(url: Url) -> bool:
    """Whether only an unused root exists, which a writer puts first; see `tracer.stores.opening.blank`."""
    with closing(Objects(url)) as objects:
        document = objects.document("")
        unmarked = document.get("node_type") == "group" and document.get("attributes", {}).keys() == {WRITER}
        return unmarked and all(one.name == "zarr.json" for one in objects.listed())


def remove_part(url: Url, part: str) -> None:
    """Remove the group of a part; see `tracer.stores.opening.remove_part`."""
    with closing(Objects(url)) as objects:
        objects.delete(one.name for one in objects.listed(part))
        objects.disperse()


def exists(url: Url) -> bool:
    """Whether an object exists at `url` or below it."""
    with closing(Objects(url)) as objects:
        return objects.any()


def remove(url: Url) -> None:
    """Remove all objects below `url`."""
    with closing(Objects(url)) as objects:
        objects.delete(one.name for one in objects.listed())
