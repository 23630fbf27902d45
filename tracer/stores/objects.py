"""Traces on object stores: S3, and through obstore Google Cloud Storage, Azure and, for reading only, HTTP.

An object is put as a whole, and never in part. So a Zarr trace has the same arrays as on a disk, and other rules for
when their shards are written: the shards of an array that may have gaps are put once, full or at a commit, and the rows
after a commit begin in the next shard; the last shard of one that must not have gaps is put again at each commit.
A request takes so long that many are made at once.

HDF5 files are only read: blocks of them are fetched and kept.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import math
import os
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    TraceUnreachableError,
)
from tracer.format.names import PART
from tracer.stores.chunks import RowChunks, check_name, rows_ahead, walk
from tracer.stores.codecs import OVERHEAD, Codec, codec_of, decode, decoded_size, encode
from tracer.stores.locations import Url
from tracer.stores.opening import WRITER
from tracer.stores.zarr import (
    CHUNKS_PER_SHARD,
    CONSOLIDATED,
    DOCUMENT_LIMIT,
    EXPANSION,
    MISSING,
    ZarrReadStore,
    _array_document,
    _crc32c,
    _Opened,
    both_indexes,
    chunks_begin,
)

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store
except ImportError as error:
    raise TraceError(
        f"a trace at a URL needs the package obstore, which cannot be imported ({error}): pip install 'tracereel[s3]'"
    ) from error

PARALLEL = 32
"""Requests at once."""
SHARD_BYTES = 16 << 20
"""Bytes of the chunks of a shard, at most, save for rows that are larger."""
GAPLESS_SHARD_BYTES = 1 << 20
"""The same for arrays without gaps, whose last shard is put again and again."""
CHUNK_FRACTION = 8
"""The chunks of one-dimensional arrays with gaps are by so much smaller, because one is padded at each commit."""
PUBLISHED_SHARDS = 16
"""An array with gaps says that it has the rows of so many shards, and then of twice as many each time."""
IN_FLIGHT_BYTES = 32 << 20
"""Bytes that are being put or fetched at once, at most, save for one object that is larger."""
MULTIPART_BYTES = 64 << 20
"""Larger objects are put in parts."""
RANGE_BYTES = 4 << 20
"""Bytes that are fetched by one request, at most, save for a chunk that is larger."""
GAP_BYTES = 65536
"""Chunks that are closer to each other than this are fetched at once."""
AHEAD_BYTES = 4 << 20
"""Bytes that are fetched ahead where an array is read chunk by chunk."""
AHEAD_ARRAYS = 4
READERS = 4
"""Blocks of messages that are read at once."""
INDEX_BYTES = 64 << 20
"""Bytes of indexes of shards that are kept."""
HEAD_BYTES = 16384
"""Bytes that are fetched with an index: a small shard is there with one request."""
BLOCK_BYTES = 1 << 18
BLOCKS = 256
"""Blocks of a file that are kept, and their size."""
RETRY_SECONDS = 60.0
"""How long a request is tried again, unless the environment says otherwise in `RETRY_VARIABLE`."""
Result = TypeVar("Result")
RETRY_VARIABLE = "TRACE_S3_RETRY_SECONDS"
REQUEST_SECONDS = 30.0
"""How long one try may take."""


def create(url: Url, *, part: str | None = None, overwrite: bool = False, durable: bool = False) -> ObjectWriteStore:
    """Make a Zarr group at `url`; see `tracer.stores.opening.create_store`. What was committed is always durable."""
    check_writable(url)
    objects = Objects(url)
    try:
        if part is not None:
            if not overwrite and objects.listed(part):
                raise TraceExistsError(
                    f"{url / part} already exists; give another path, or say that it may be overwritten"
                )
            objects.delete(one.name for one in objects.listed(part))
        elif objects.any():
            if not overwrite:
                raise TraceExistsError(f"{url} already exists; give another path, or say that it may be overwritten")
            document = objects.document("")
            if document.get("node_type") != "group":
                raise TraceExistsError(f"{url} already exists, and is not a Zarr group that could be overwritten")
            objects.delete(one.name for one in objects.listed())
        return ObjectWriteStore(objects, part)
    except BaseException:
        objects.close()
        raise


def open(url: Url, *, damaged: bool = False) -> Any:
    """Open the trace at `url`; see `tracer.stores.opening.open_store`."""
    if url.suffix.lower() != ".zarr":
        from tracer.stores import hdf5

        return hdf5.open_file(ObjectFile(url), damaged=damaged)
    objects = Objects(url)
    try:
        document = objects.document("")
        is_group = document.get("zarr_format") == 3 and document.get("node_type") == "group"
        if not is_group:
            if not document and not objects.any():
                raise TraceNotFoundError(f"there is no trace at {url}")
            # an http server has no lists
            names = [] if url.scheme.startswith("http") else [one.name for one in objects.listed()]
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


def check_writable(url: Url) -> None:
    """Raise `TraceFormatError` where no trace can be written."""
    if url.suffix.lower() != ".zarr":
        raise TraceFormatError(
            f"{url}: HDF5 on an object store is read-only; record to a URL that ends in .zarr, and use `trace convert`"
        )
    if url.scheme.startswith("http"):
        raise TraceFormatError(f"{url}: a trace can be read from an http server, and not be written there")


def files(url: Url) -> list[Url]:
    """Where the parts of a trace are: below one URL, or in files beside each other."""
    if url.suffix.lower() == ".zarr" or url.scheme.startswith("http"):
        return [url]
    folder, _, _ = url.key.rpartition("/")
    objects = Objects(Url(url.scheme, url.bucket, folder))
    try:
        names = objects.names()
    finally:
        objects.close()
    beside = []
    for name in names:
        if name.startswith(f"{url.stem}.") and name.endswith(url.suffix):
            part = PART.fullmatch(name[len(url.stem) + 1 : len(name) - len(url.suffix)])
            if part is not None and part[0] != "rank0":
                key = f"{folder}/{name}" if folder else name
                beside.append((int(part["rank"]), int(part["attempt"] or 0), Url(url.scheme, url.bucket, key)))
    found = [file for _, _, file in sorted(beside, key=lambda one: one[:2])]
    return [url, *found] if url.name in names or not found else found


def blank(url: Url) -> bool:
    """Whether nothing is there but the root, which comes first; see `tracer.stores.opening.blank`."""
    if url.suffix.lower() != ".zarr":
        return False
    objects = Objects(url)
    try:
        document = objects.document("")
        unmarked = document.get("node_type") == "group" and document.get("attributes", {}).keys() == {WRITER}
        return unmarked and all(one.name == "zarr.json" for one in objects.listed())
    finally:
        objects.close()


def remove_part(url: Url, part: str) -> None:
    """Remove the group of a part; see `tracer.stores.opening.remove_part`."""
    objects = Objects(url)
    try:
        objects.delete(one.name for one in objects.listed(part))
        objects.disperse()
    finally:
        objects.close()


def exists(url: Url) -> bool:
    """Whether there is an object at `url` or below it."""
    objects = Objects(url)
    try:
        return objects.any()
    finally:
        objects.close()


def remove(url: Url) -> None:
    """Remove all objects below `url`."""
    objects = Objects(url)
    try:
        objects.delete(one.name for one in objects.listed())
    finally:
        objects.close()


class Found(NamedTuple):
    """An object in a list."""

    name: str
    nbytes: int
    modified: float


class Part(NamedTuple):
    """A part of an object, and the size of the whole."""

    data: memoryview
    nbytes: int


class Objects:
    """The objects below a URL, by their names relative to it; ``""`` is the object at the URL itself.

    May be used by several threads.
    """

    def __init__(self, url: Url) -> None:
        self.url = url
        # the parent is what the store is opened at, so that the object at the URL itself can be named, too
        parent, _, self._base = url.key.rpartition("/")
        self._store = _connect(url, parent)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def get(self, name: str, start: int = 0, nbytes: int = DOCUMENT_LIMIT + 1, version: str = "") -> Part | None:
        """A part of an object, shorter where the object is; None if there is no such object.

        Parameters
        ----------
        version : str
            Refuse another version of the object than this (`ETag`).
        """
        options: Any = {"range": (start, start + nbytes)}
        if version:
            options["if_match"] = version
        try:
            found = obstore.get(self._store, self._path(name), options=options)
            return Part(memoryview(found.bytes()).cast("B"), found.meta["size"])
        except FileNotFoundError as error:
            self._check_bucket(error)
            return None
        except (BaseError, OSError, ValueError) as error:
            # nothing is there from this offset on
            if re.search(r"status code: 416|<Code>InvalidRange</Code>", str(error)):
                return Part(memoryview(b""), 0)
            raise self._failed("read", error) from error

    def document(self, name: str) -> dict[str, Any]:
        """The ``zarr.json`` of an array or group; empty where there is none, or where it is no JSON object."""
        part = self.get(f"{name}/zarr.json" if name else "zarr.json")
        if part is None or len(part.data) > DOCUMENT_LIMIT:
            return {}
        try:
            document = json.loads(bytes(part.data))
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def head(self, name: str = "") -> Mapping[str, Any] | None:
        """What the store says of an object: ``size``, ``last_modified``, ``e_tag``."""
        try:
            return cast("Mapping[str, Any]", obstore.head(self._store, self._path(name)))
        except FileNotFoundError as error:
            self._check_bucket(error)
            return None
        except (BaseError, OSError, ValueError) as error:
            raise self._failed("read", error) from error

    def put(self, name: str, data: bytes | bytearray) -> None:
        """Put an object, over one that is there."""
        try:
            obstore.put(
                self._store,
                self._path(name),
                memoryview(data),
                use_multipart=len(data) > MULTIPART_BYTES,
                chunk_size=SHARD_BYTES,
                max_concurrency=4,
            )
        except (BaseError, OSError, ValueError) as error:
            raise self._failed("written", error) from error

    def put_new(self, name: str, data: bytes) -> None:
        """Put an object where none is; `TraceExistsError` if there is one."""
        try:
            obstore.put(self._store, self._path(name), data, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            # a try whose answer was lost may have put it
            part = self.get(name)
            if part is None or bytes(part.data) != data:
                raise TraceExistsError(f"{self.url} was made by somebody else in the meantime") from error
        except NotSupportedError:
            # the store was said to have no conditional requests; whether something is there was looked up before
            self.put(name, data)
        except (BaseError, OSError, ValueError) as error:
            raise self._failed("written", error) from error

    def listed(self, prefix: str = "") -> list[Found]:
        """All objects below a prefix, which is a whole number of parts."""
        path = self._path(prefix)

        def found() -> list[Found]:
            return [
                Found(one["path"][len(self._base) + 1 :], one["size"], one["last_modified"].timestamp())
                for page in obstore.list(self._store, path, chunk_size=1000)
                for one in page
            ]

        try:
            return _whole(found)
        except (BaseError, OSError, ValueError) as error:
            self._check_bucket(error)
            raise self._failed("listed", error) from error

    def names(self) -> list[str]:
        """What is directly below the URL: objects, and what others are below of."""
        try:
            found = _whole(lambda: obstore.list_with_delimiter(self._store, self._base or None))
        except (BaseError, OSError, ValueError) as error:
            self._check_bucket(error)
            raise self._failed("listed", error) from error
        paths = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        return [path.rpartition("/")[2] for path in paths]

    def any(self) -> bool:
        """Whether there is an object at the URL or below it."""
        if self.url.scheme.startswith("http"):
            # no lists there
            return self.head("zarr.json") is not None or self.head() is not None
        try:
            if _whole(lambda: any(obstore.list(self._store, self._base, chunk_size=1))):
                return True
        except (BaseError, OSError, ValueError) as error:
            self._check_bucket(error)
            raise self._failed("listed", error) from error
        return self.head() is not None

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects, first the ``zarr.json`` of the root, which makes the others a trace."""
        paths = [self._path(name) for name in sorted(names, key=lambda name: name != "zarr.json")]
        try:
            for some in (paths[:1], *(paths[begin : begin + 1000] for begin in range(1, len(paths), 1000))):
                obstore.delete(self._store, some)
        except (BaseError, OSError, ValueError) as error:
            raise self._failed("removed", error) from error

    def disperse(self) -> None:
        """Take out of the root what zarr-python consolidated there, because it does not know what was put since."""
        document = self.document("")
        if document.pop(CONSOLIDATED, None) is not None:
            self.put("zarr.json", json.dumps(document).encode())

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call a function in one of the threads; it must not wait for another one.

        It is called at once where there are no threads any more: a program that ends starts none.
        """
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(PARALLEL, "trace-objects")
            try:
                return self._threads.submit(function, *arguments)
            except RuntimeError:
                pass
        done: Future[Result] = Future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            done.set_exception(error)
        return done

    def at_once(self, function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]]) -> list[Result]:
        """The results of a function for each of several arguments, called at once; not from one of the threads."""
        several = list(arguments)
        if len(several) < 2:
            return [function(*one) for one in several]
        return [future.result() for future in [self.submit(function, *one) for one in several]]

    def close(self) -> None:
        """End the threads; requests that are being made are not waited for."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def array_with_other_codecs(self, name: str) -> Any:
        """zarr-python's array."""
        import zarr
        from zarr.storage import ObjectStore

        try:
            store: Any = ObjectStore(_connect(self.url, f"{self.url.key}/{name}"), read_only=True)
            return zarr.open_array(store, mode="r", zarr_format=3)
        except Exception as error:
            raise TraceFormatError(f"{self.url}: array {name!r} cannot be opened: {_reason(error)}") from error

    def _failed(self, what: str, error: Exception) -> TraceUnreachableError:
        return TraceUnreachableError(f"{self.url} cannot be {what}: {_reason(error)}")

    def _check_bucket(self, error: Exception) -> None:
        if re.search(r"NoSuchBucket|ContainerNotFound|bucket does not exist", str(error)):
            raise TraceNotFoundError(f"{self.url}: there is no bucket {self.url.bucket!r}") from error


def _reason(error: Exception) -> str:
    """Why a request failed, on one line, and without the request.

    Examples
    --------
    >>> _reason(ValueError("403: <Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"))
    'Access Denied (AccessDenied)'
    """
    text = str(error)
    said = re.search(r"<Code>(.*?)</Code>(?:\s*<Message>(.*?)</Message>)?", text, re.DOTALL)
    if said is not None:
        return f"{said[2]} ({said[1]})" if said[2] else said[1]
    text = re.split(r"\n\s*\n?Debug source", text)[0]
    return " ".join(re.sub(r", max_retries: \d+, retry_timeout: \S+", "", text).split())


def _retry_seconds() -> float:
    """How long a request is tried again."""
    said = os.environ.get(RETRY_VARIABLE, str(RETRY_SECONDS))
    try:
        seconds = float(said)
        if not 0 <= seconds <= 86400:
            raise ValueError
    except ValueError:
        raise TraceError(f"{RETRY_VARIABLE} is a number of seconds, at most a day, and not {said!r}") from None
    return seconds


def _whole(ask: Callable[[], Result]) -> Result:
    """What a store answers; asked again where an answer breaks off, which obstore does not do for lists."""
    until = time.monotonic() + _retry_seconds()
    pause = 0.1
    while True:
        try:
            return ask()
        except BaseError as error:
            if "response body" not in str(error) or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 2.0)


def _connect(url: Url, prefix: str) -> Any:
    """Obstore's store of a folder."""
    seconds = _retry_seconds()
    second = dt.timedelta(seconds=1)
    retry: Any = {
        "max_retries": 100_000,
        "retry_timeout": seconds * second,
        "backoff": {"init_backoff": second / 10, "max_backoff": 2 * second, "base": 2},
    }
    client: Any = {"timeout": min(REQUEST_SECONDS, max(seconds, 1.0)) * second, "connect_timeout": 5 * second}
    common: Any = {"prefix": prefix or None, "client_options": client, "retry_config": retry}
    try:
        if url.scheme == "s3":
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
            if endpoint.startswith("http://"):
                client["allow_http"] = True
            return S3Store(url.bucket, credential_provider=_aws_credentials(url), **common)
        if url.scheme == "gs":
            return GCSStore(url.bucket, **common)
        if url.scheme == "az":
            return AzureStore(url.bucket, **common)
        client["allow_http"] = url.scheme == "http"
        root = f"{url.scheme}://{url.bucket}/{prefix}".rstrip("/")
        return HTTPStore.from_url(root, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise TraceUnreachableError(f"{url} cannot be reached: {_reason(error)}") from error


def _aws_credentials(url: Url) -> Any:
    """What gives credentials of the files in ``~/.aws`` and of whatever else boto3 knows; None where obstore does."""
    known = (
        *("ACCESS_KEY_ID", "WEB_IDENTITY_TOKEN_FILE", "SKIP_SIGNATURE"),
        *("CONTAINER_CREDENTIALS_RELATIVE_URI", "CONTAINER_CREDENTIALS_FULL_URI"),
    )
    if any(os.environ.get(f"AWS_{name}") for name in known):
        return None
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        # of an instance, obstore gets them itself
        return None
    try:
        return Boto3CredentialProvider()
    except (ValueError, BotoCoreError) as error:
        why = "" if isinstance(error, ValueError) else f" ({error})"
        raise TraceUnreachableError(
            f"there are no credentials for {url}{why}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, "
            "or AWS_SKIP_SIGNATURE=true for a bucket that is public"
        ) from error


def _layout(rows: RowChunks, gapless: bool, codec: Codec | None) -> tuple[int, dict[str, Any]]:
    """How many chunks a shard has, and the ``zarr.json`` of an array, without what changes."""
    limit = GAPLESS_SHARD_BYTES if gapless else SHARD_BYTES
    heights = min(CHUNKS_PER_SHARD // rows.per_row, limit // (rows.per_row * rows.chunk_nbytes))
    heights = max(1, heights)
    trailing = [count * size for count, size in zip(rows.grid, rows.chunk[1:], strict=True)]
    return heights * rows.per_row, _array_document(rows.dtype, rows.chunk, (heights * rows.chunk[0], *trailing), codec)


class _Shard:
    """A shard that is being filled: behind room for its index, chunks as they come."""

    __slots__ = ("buffer", "changed", "index", "number")

    def __init__(self, number: int, chunks: int) -> None:
        self.number = number
        self.index = np.full((chunks, 2), MISSING, "<u8")
        self.buffer = bytearray(chunks_begin(chunks))
        self.changed = False

    def add(self, place: int, data: memoryview | bytes) -> None:
        """Append a chunk, in the place of the last one if that was not full."""
        if self.index[place, 0] != MISSING:
            del self.buffer[int(self.index[place, 0]) :]
        self.index[place] = len(self.buffer), len(data) + 4
        self.buffer += data
        self.buffer += _crc32c(data)
        self.changed = True

    def sealed(self) -> bytearray:
        """The object."""
        data = both_indexes(self.index)
        self.buffer[: len(data)] = data
        self.changed = False
        return self.buffer


class _Array:
    """An array that is being written."""

    __slots__ = (
        *("attrs", "codec", "end", "gapless", "name", "per_shard", "published", "rows", "shard", "shard_rows"),
        "template",
    )

    def __init__(self, name: str, rows: RowChunks, gapless: bool, codec: Codec | None) -> None:
        self.name = name
        self.rows = rows
        self.gapless = gapless
        self.codec = codec
        self.per_shard, self.template = _layout(rows, gapless, codec)
        self.shard_rows: int = self.template["chunk_grid"]["configuration"]["chunk_shape"][0]
        self.shard: _Shard | None = None
        self.attrs: dict[str, Any] = {}
        # one behind the last row that there is
        self.end = 0
        # rows that its zarr.json says
        self.published = -1

    def key(self, shard: int) -> str:
        return "/".join([self.name, "c", str(shard), *["0"] * len(self.rows.shape)])

    def document(self, rows: int) -> dict[str, Any]:
        self.published = rows
        return self.template | {"shape": [rows, *self.rows.shape], "attributes": self.attrs}

    def to_publish(self) -> int:
        """Rows that the zarr.json should say."""
        if self.gapless:
            return self.end
        return rows_ahead(self.end, PUBLISHED_SHARDS * self.shard_rows)


class ObjectWriteStore:
    """A Zarr group on an object store being written; see `tracer.stores.protocols.WriteStore`."""

    def __init__(self, objects: Objects, part: str | None) -> None:
        self.path = objects.url
        self.checksums_chunks = True
        self.seals = False
        self.plainly_compressed = True
        self.unhurried = False
        self._objects = objects
        self._arrays: dict[str, _Array] = {}
        self._groups: dict[str, dict[str, Any]] = {"": {}}
        self._changed: dict[str, None] = {"": None}
        self._flying: OrderedDict[Future[Any], int] = OrderedDict()
        self._closed = False
        self._touched = "" if part is None else part
        # whether the root has attributes that another process set
        self._joined = False
        # of two writers one is refused; the number tells whose object it is
        writer = {"zarr_format": 3, "node_type": "group", "attributes": {WRITER: uuid.uuid4().hex}}
        if part is not None:
            self._groups[part] = {}
            self._changed[part] = None
            attributes = objects.document("").get("attributes")
            if isinstance(attributes, dict) and "format" in attributes:
                self._joined = True
                del self._changed[""]
                objects.disperse()
        if part is not None:
            objects.put_new(f"{part}/zarr.json", json.dumps(writer).encode())
        if not self._joined:
            try:
                objects.put_new("zarr.json", json.dumps(writer).encode())
            except TraceExistsError:
                if part is None:
                    raise
                # another rank made it, which says there what this one will say, too: that one may have been killed

    @property
    def can_create(self) -> bool:
        """Always true: arrays can be made at any time."""
        return True

    def create(
        self,
        name: str,
        *,
        dtype: str,
        shape: tuple[int, ...],
        chunk_bytes: int,
        compression: str | None = None,
        gapless: bool = False,
    ) -> None:
        self._open()
        check_name(name)
        if name in self._arrays or name in self._groups:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if any(parent in self._arrays for parent in parents):
            raise TraceError(f"{self.path}: {name!r} lies within an array")
        if not gapless and not shape:
            chunk_bytes = max(1, chunk_bytes // CHUNK_FRACTION)
        array = _Array(name, RowChunks(name, dtype, shape, chunk_bytes), gapless, codec_of(compression))
        for parent in parents:
            if parent not in self._groups:
                self._groups[parent] = {}
                self._changed[parent] = None
        self._arrays[name] = array
        self._changed[name] = None

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        array = self._array(name)
        first = array.rows.rows
        array.rows.append(rows, lambda number, pieces: self._add_all(array, number, pieces))
        array.end = array.rows.rows
        self._changed[name] = None
        return first

    def length(self, name: str) -> int:
        return self._array(name).rows.rows

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        if name == "" and self._joined:
            return
        if name in self._groups:
            self._groups[name].update(values)
        else:
            array = self._array(name)
            array.attrs.update(values)
            array.published = -1
        self._changed[name] = None

    def seal(self) -> None:
        """Do nothing: arrays can be made at any time."""

    def commit(self) -> None:
        self._open()
        gapless = []
        for name in self._changed:
            array = self._arrays.get(name)
            if array is None:
                self._put_group(name)
                continue
            tail = array.rows.take_tail()
            if tail is not None:
                self._add(array, *tail)
            if array.shard is not None and array.shard.changed:
                # that of an array without gaps goes on to grow
                data = array.shard.sealed()
                self._put(array.key(array.shard.number), bytes(data) if array.gapless else data)
            if array.gapless:
                gapless.append(array)
                continue
            # the next rows go into another shard, because this one is there and objects do not change
            array.shard = None
            array.rows.skip(-(-array.rows.rows // array.shard_rows) * array.shard_rows)
            if array.to_publish() > array.published:
                self._put_document(name, array.document(array.to_publish()))
        self._land()
        # their length says what is there, so it comes after that
        for array in gapless:
            if array.published != array.end:
                self._put_document(array.name, array.document(array.end))
        self._land()
        self._changed.clear()

    def touch(self) -> None:
        self._put_group(self._touched)
        self._land()

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        """Do nothing: a request that failed was tried for long enough."""

    def _put_group(self, name: str) -> None:
        self._put_document(name, {"zarr_format": 3, "node_type": "group", "attributes": self._groups[name]})

    def close(self) -> None:
        if self._closed:
            return
        self.commit()
        # so that a finished array looks no longer than it is
        for array in self._arrays.values():
            if array.published != array.end:
                self._put_document(array.name, array.document(array.end))
        self._land()
        self._objects.disperse()
        self.abandon()

    def abandon(self) -> None:
        self._closed = True
        self._flying.clear()
        self._arrays.clear()
        self._objects.close()

    def discard(self) -> None:
        self.abandon()

    def _open(self) -> None:
        if self._closed:
            raise TraceError(f"{self.path} is closed")

    def _array(self, name: str) -> _Array:
        self._open()
        if name not in self._arrays:
            raise TraceError(f"{self.path} has no array {name!r}")
        return self._arrays[name]

    def _add_all(self, array: _Array, number: int, pieces: Iterable[memoryview]) -> None:
        for one, data in enumerate(pieces, number):
            self._add(array, one, data)

    def _add(self, array: _Array, number: int, data: memoryview) -> None:
        """Put a chunk into its shard, and the one before it on its way."""
        shard_number, place = divmod(number, array.per_shard)
        shard = array.shard
        if shard is None or shard.number != shard_number:
            if shard is not None and shard.changed:
                self._put(array.key(shard.number), shard.sealed())
            shard = array.shard = _Shard(shard_number, array.per_shard)
        shard.add(place, data if array.codec is None else encode(array.codec, data, array.rows.dtype.itemsize))

    def _put_document(self, name: str, document: Mapping[str, Any]) -> None:
        try:
            text = json.dumps(document)
        except (TypeError, ValueError) as error:
            raise TraceError(f"the attributes of {self.path / name} cannot be written as JSON: {error}") from error
        self._put(f"{name}/zarr.json" if name else "zarr.json", text.encode())

    def _put(self, name: str, data: bytes | bytearray) -> None:
        while self._flying and sum(self._flying.values()) + len(data) > IN_FLIGHT_BYTES:
            self._flying.popitem(last=False)[0].result()
        self._flying[self._objects.submit(self._objects.put, name, data)] = len(data)

    def _land(self) -> None:
        while self._flying:
            self._flying.popitem(last=False)[0].result()


class _Index(NamedTuple):
    """The index of a shard, how large the object is, and what it begins with."""

    entries: NDArray[np.uint64]
    nbytes: int
    head: memoryview


class ObjectReadStore(ZarrReadStore):
    """A Zarr group on an object store being read; see `tracer.stores.protocols.ReadStore`."""

    def __init__(self, objects: Objects, root: Mapping[str, Any]) -> None:
        # what reads directories only joins and prints their paths, and a URL can be joined and printed
        super().__init__(cast("Path", objects.url))
        self._objects = objects
        # used once, because the attributes may change
        self._root_document: Mapping[str, Any] | None = root
        self._indexes: dict[str, dict[int, _Index]] = {}
        self._kept = 0
        self._ahead: OrderedDict[str, tuple[int, int, memoryview]] = OrderedDict()
        self._ends: dict[str, tuple[int, int]] = {}
        self.readers = READERS
        # a shard does not change, so reading it again would tell the same
        self.reads = 1
        # what was fetched for a thread before it asks for it: of others it could be too old
        self._coming = threading.local()
        # other threads than those of the requests, which they wait for
        self._waiting = ThreadPoolExecutor(PARALLEL, "trace-objects-ahead")

    @property
    def modified(self) -> float:
        """When an object was last put."""
        if self._objects.url.scheme.startswith("http"):
            # no lists there
            heads = [self._objects.head(f"{name}/zarr.json") for name in self._arrays]
            return max((one["last_modified"].timestamp() for one in heads if one is not None), default=0.0)
        return max((one.modified for one in self._objects.listed()), default=0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return 0 if self._objects.url.scheme.startswith("http") else sum(one.nbytes for one in self._objects.listed())

    def parts(self) -> list[str]:
        # an http server has no lists; its traces are those of one process
        names = ["rank0"] if self._objects.url.scheme.startswith("http") else self._objects.names()
        return [name for name in names if PART.fullmatch(name)]

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._tree()[0] if name.startswith(prefix))

    def _tree(self) -> tuple[set[str], set[str]]:
        """The arrays and the groups, by where there are objects; a folder with shards is an array."""
        documents, arrays = set(), set()
        for one in self._objects.listed():
            folder, _, last = one.name.rpartition("/")
            if last == "zarr.json":
                documents.add(folder)
            else:
                arrays.add(re.split(r"(?:^|/)c/[0-9/]+$", one.name)[0])
        groups = {
            "/".join(name.split("/")[:depth]) for name in documents | arrays for depth in range(name.count("/") + 1)
        }
        groups.discard("")
        rest = sorted(documents - arrays - groups - {""})
        told = self._objects.at_once(self._objects.document, ((name,) for name in rest))
        arrays = (arrays & documents) - groups
        arrays |= {name for name, one in zip(rest, told, strict=True) if one.get("node_type") == "array"}
        return arrays, groups | {""}

    def damaged_groups(self) -> list[str]:
        """What is wrong with the ``zarr.json`` of groups."""
        groups = sorted(self._tree()[1])
        found = []
        for name, document in zip(
            groups, self._objects.at_once(self._objects.document, ((n,) for n in groups)), strict=True
        ):
            if document.get("node_type") != "group" or document.get("zarr_format") != 3:
                found.append(
                    f"the zarr.json of {repr(name) if name else 'the root'} is not there or not that of a group"
                )
        return found

    def attrs(self, name: str = "") -> dict[str, Any]:
        if name:
            check_name(name)
        document = None if name else self._root_document
        if document is None:
            document = self._objects.document(name)
        else:
            self._root_document = None
        attributes = document.get("attributes", {})
        return attributes if isinstance(attributes, dict) else {}

    def stored_rows(self, name: str) -> int:
        array = self._open(name)
        if array.array is not None:
            nbytes = sum(one.nbytes for one in self._objects.listed(name))
            return int(EXPANSION * nbytes // max(1, array.dtype.itemsize * math.prod(array.shape[1:])))
        numbers = self._numbers(name)
        # as on a disk: a shard's number is its name, which may say anything
        return min(max(numbers, default=-1) + 1, 1000 * (len(numbers) + 1)) * array.shard_rows

    def _numbers(self, name: str) -> list[int]:
        """Numbers of the shards that are there."""
        found = []
        for one in self._objects.listed(f"{name}/c"):
            number = one.name[len(name) + 3 :].partition("/")[0]
            if number.isdecimal() and len(number) < 16:
                found.append(int(number))
        return found

    def has_chunk(self, name: str, row: int) -> bool:
        array = self._open(name)
        if array.array is not None:
            return True
        shard, place = divmod(row, array.shard_rows)
        try:
            index = self._index(name, array, shard)
        except TraceCorruptError:
            return self._objects.head(self._key(name, array, shard)) is not None
        entry = place // int(array.chunk[0]) * (array.per_shard * int(array.chunk[0]) // array.shard_rows)
        return bool(index.entries[entry, 0] != MISSING)

    def will_open(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        documents = self._objects.at_once(self._objects.document, ((name,) for name in names))
        self._coming.documents = dict(zip(names, documents, strict=True))

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        # one range is as well read when it is asked for
        several = ranges if len(ranges) > 1 else ()
        read = super().read

        def hinted(name: str, start: int, stop: int) -> NDArray[Any]:
            self._coming.hinted = True
            return read(name, start, stop)

        self._coming.found = {one: self._waiting.submit(hinted, *one) for one in several}

    def place(self, name: str, row: int) -> None:
        """None: nothing lies in a file here."""

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        out: NDArray[Any] | None = None,
        *,
        checksums: list[int] | None = None,
        verify: bool = True,
    ) -> NDArray[Any]:
        coming = getattr(self._coming, "found", {}).pop((name, start, stop), None)
        return super().read(name, start, stop, out) if coming is None else coming.result()

    def close(self) -> None:
        super().close()
        self._ahead.clear()
        self._indexes.clear()
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._objects.close()

    def _open(self, name: str, anew: bool = False) -> _Opened:
        array = self._arrays.get(name)
        if array is None or (anew and name not in self._assumed):
            check_name(name)
            # the last shard may have been put again
            self._indexes.pop(name, None)
            self._ahead.pop(name, None)
            document = getattr(self._coming, "documents", {}).pop(name, None)
            array = self._opened(name, self._objects.document(name) if document is None else document)
            self._arrays[name] = array
        return array

    def _opened(self, name: str, document: Mapping[str, Any]) -> _Opened:
        return _Opened(self.path, name, document, lambda _, name: self._objects.array_with_other_codecs(name))

    def _made_as(self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int, codec: Codec | None) -> _Opened:
        rows = RowChunks(name, dtype, shape, chunk_bytes)
        last = max(self._numbers(name), default=-1)
        for gapless in (False, True):
            array = self._opened(name, _layout(rows, gapless, codec)[1] | {"shape": [0, *shape]})
            self._indexes.pop(name, None)
            # only with the right number of chunks does the index pass its checksum
            if len(self._index_of(name, array, last)):
                break
        return array

    def _decoded_size(self, name: str, array: _Opened, shard: int, offset: int) -> int:
        with contextlib.suppress(TraceCorruptError):
            part = self._objects.get(self._key(name, array, shard), offset, OVERHEAD)
            if part is not None:
                return decoded_size(bytes(part.data))
        return 0

    def _index_of(self, name: str, array: _Opened, shard: int) -> NDArray[np.uint64]:
        with contextlib.suppress(TraceCorruptError):
            if shard >= 0:
                return self._index(name, array, shard).entries
        return np.empty((0, 2), "<u8")

    def _inside(self, path: Path) -> None:
        """Do nothing: there are no links on an object store."""

    def _key(self, name: str, array: _Opened, shard: int) -> str:
        return "/".join([name, "c", str(shard), *["0"] * (len(array.shape) - 1)])

    def _index(self, name: str, array: _Opened, shard: int) -> _Index:
        known = self._indexes.setdefault(name, {})
        index = known.get(shard)
        if index is None:
            nbytes = max(chunks_begin(array.per_shard), HEAD_BYTES)
            part = self._objects.get(self._key(name, array, shard), 0, nbytes)
            if part is None:
                raise TraceCorruptError(f"{self.path}: shard {shard} of array {name!r} is not there")
            head = part.data
            entries, _ = self._index_in(name, array, shard, lambda begin, size: bytes(head[begin : begin + size]))
            index = _Index(entries, part.nbytes, head)
            self._kept += index.entries.nbytes + len(index.head)
            if self._kept > INDEX_BYTES:
                self._indexes.clear()
                self._kept = 0
            known[shard] = index
        return index

    def _check_size(self, name: str, array: _Opened, start: int, stop: int) -> None:
        nbytes = (stop - start) * array.dtype.itemsize * math.prod(array.shape[1:])
        if nbytes <= DOCUMENT_LIMIT:
            return
        if array.array is not None:
            missing = nbytes > EXPANSION * sum(one.nbytes for one in self._objects.listed(name))
        else:
            there = array.chunk_nbytes
            first, last = start // array.shard_rows, (stop - 1) // array.shard_rows
            # ends at the first shard that is not there
            for begin in range(first, last + 1, PARALLEL):
                some = range(begin, min(begin + PARALLEL, last + 1))
                indexes = self._objects.at_once(self._index, ((name, array, one) for one in some))
                if array.codec is None:
                    there += sum(index.nbytes for index in indexes)
                else:
                    # chunks that share their bytes are not there so often
                    places = (np.unique(index.entries[:, 0]) for index in indexes)
                    there += array.chunk_nbytes * sum(int((one != MISSING).sum()) for one in places)
            missing = nbytes > there
        if missing:
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than what is there of it")

    def _read_compressed(self, name: str, array: _Opened, start: int, stop: int, out: NDArray[np.uint8]) -> None:
        self._read(name, array, start, stop, out)

    def _read(
        self, name: str, array: _Opened, start: int, stop: int, out: NDArray[np.uint8], verify: bool = True
    ) -> list[int]:
        """Fill `out` with rows ``start`` to ``stop``: chunks that are close to each other with one request."""
        first, end = start * array.row_nbytes, stop * array.row_nbytes
        waiting: list[_Range] = []
        for shard, chunks in self._chunks(name, array, start, stop):
            for one in _ranges(shard, chunks):
                waiting.append(one)
                if sum(each.nbytes for each in waiting) >= IN_FLIGHT_BYTES:
                    self._fill(name, array, waiting, first, end, out)
                    waiting.clear()
        self._fill(name, array, waiting, first, end, out)
        return []

    def _chunks(self, name: str, array: _Opened, start: int, stop: int) -> Iterator[tuple[int, list[_Chunk]]]:
        """The chunks of some rows by shard, where they are; their indexes are fetched many at once."""
        most = array.chunk_nbytes + 4 + (0 if array.codec is None else OVERHEAD)
        shards: dict[int, list[tuple[int, int, int]]] = {}
        for one in walk(array.shape, array.chunk, array.dtype.itemsize, start, stop):
            shards.setdefault(one[0] // array.per_shard, []).append(one)
        numbers = list(shards)
        for begin in range(0, len(numbers), PARALLEL):
            some = numbers[begin : begin + PARALLEL]
            indexes = self._objects.at_once(self._index, ((name, array, shard) for shard in some))
            for shard, index in zip(some, indexes, strict=True):
                chunks = []
                for number, place, length in shards.pop(shard):
                    offset, nbytes = index.entries[number % array.per_shard].tolist()
                    if nbytes != most and (array.codec is None or not 4 < nbytes < most):
                        raise TraceCorruptError(f"{self.path}: array {name!r} lacks its chunk {number}")
                    chunks.append(_Chunk(offset, nbytes, number, place, length))
                yield shard, chunks

    def _fill(
        self, name: str, array: _Opened, ranges: list[_Range], first: int, end: int, out: NDArray[np.uint8]
    ) -> None:
        if not ranges:
            return
        found = self._objects.at_once(self._fetch, ((name, array, one, len(ranges) == 1) for one in ranges))
        for one, data in zip(ranges, found, strict=True):
            for chunk in one.chunks:
                at = chunk.offset - one.start
                stored = data[at : at + chunk.nbytes]
                if len(stored) != chunk.nbytes or _crc32c(stored[:-4]) != stored[-4:]:
                    raise TraceCorruptError(f"{self.path}: chunk {chunk.number} of array {name!r} fails its checksum")
                low, high = max(chunk.begin, first), min(chunk.begin + chunk.length, end)
                numbers = np.frombuffer(stored[:-4], np.uint8)
                if array.codec is not None:
                    decoded = np.empty(array.chunk_nbytes, np.uint8)
                    if not decode(array.codec, numbers, decoded, array.dtype.itemsize):
                        raise TraceCorruptError(
                            f"{self.path}: chunk {chunk.number} of array {name!r} cannot be decoded"
                        )
                    numbers = decoded
                out[low - first : high - first] = numbers[low - chunk.begin : high - chunk.begin]

    def _fetch(self, name: str, array: _Opened, wanted: _Range, alone: bool) -> memoryview:
        """The bytes of a range of a shard, and for the next time those behind it if the one before was just read."""
        shard, start, nbytes = wanted.shard, wanted.start, wanted.nbytes
        head = self._index(name, array, shard).head
        if start + nbytes <= len(head):
            self._ends[name] = (shard, start + nbytes)
            return head[start : start + nbytes]
        # threads that read the same array at the same time only make each other fetch again
        ahead = self._ahead.get(name)
        if ahead is not None and ahead[0] == shard and ahead[1] <= start:
            data = ahead[2][start - ahead[1] :][:nbytes]
            if len(data) == nbytes:
                self._ends[name] = (shard, start + nbytes)
                return data
        last_shard, last = self._ends.get(name, (-1, -1))
        begins = start == chunks_begin(array.per_shard) and shard == last_shard + 1
        # not where other arrays are read in between
        alone = alone and not getattr(self._coming, "hinted", False)
        follows = alone and ((shard, start) == (last_shard, last) or (begins and last >= 0))
        self._ends[name] = (shard, start + nbytes)
        part = self._objects.get(self._key(name, array, shard), start, max(nbytes, AHEAD_BYTES) if follows else nbytes)
        if part is None:
            raise TraceCorruptError(f"{self.path}: shard {shard} of array {name!r} is not there")
        if follows:
            self._ahead[name] = (shard, start, part.data)
            while len(self._ahead) > AHEAD_ARRAYS:
                with contextlib.suppress(KeyError):
                    self._ahead.popitem(last=False)
        return part.data[:nbytes]


class _Chunk(NamedTuple):
    """Where a chunk is in its shard, and what of an array's rows it holds; see `tracer.stores.chunks.walk`."""

    offset: int
    nbytes: int
    number: int
    begin: int
    length: int


class _Range(NamedTuple):
    """A part of a shard that is fetched by one request."""

    shard: int
    start: int
    nbytes: int
    chunks: list[_Chunk]


def _ranges(shard: int, chunks: list[_Chunk]) -> Iterator[_Range]:
    """Put chunks of a shard that are close to each other together."""
    chunks = sorted(chunks)
    begin = 0
    for number, chunk in enumerate(chunks):
        following = chunks[number + 1] if number + 1 < len(chunks) else None
        start, end = chunks[begin].offset, chunk.offset + chunk.nbytes
        if (
            following is None
            or following.offset > end + GAP_BYTES
            or following.offset + following.nbytes - start > RANGE_BYTES
        ):
            yield _Range(shard, start, end - start, chunks[begin : number + 1])
            begin = number + 1


class ObjectFile:
    """An object that is read like a file at a `Path`: in blocks, of which the last used ones are kept."""

    def __init__(self, url: Url) -> None:
        self.url = url
        self.name = url.name
        self._objects = Objects(url)
        head = self._objects.head()
        if head is None:
            self._objects.close()
            raise TraceNotFoundError(f"there is no trace at {url}")
        self._nbytes = int(head["size"])
        self._modified: float = head["last_modified"].timestamp()
        self._version = str(head.get("e_tag") or "")
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()

    def __str__(self) -> str:
        return str(self.url)

    def stat(self) -> os.stat_result:
        """The size and the time of the last change; the rest is 0."""
        return os.stat_result((0, 0, 0, 0, 0, 0, self._nbytes, 0, self._modified, 0))

    def open(self, mode: str = "rb", buffering: int = -1) -> io.RawIOBase:
        """A file object, for reading."""
        return _Opening(self)

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Get the blocks of some ranges, offset and size, at once; those of some 16 MiB can be kept."""
        wanted = sorted(
            {
                number
                for offset, nbytes in ranges
                for number in range(offset // BLOCK_BYTES, -(-min(offset + nbytes, self._nbytes) // BLOCK_BYTES))
                if number not in self._blocks
            }
        )
        runs: list[list[int]] = []
        for number in wanted:
            if runs and number == runs[-1][-1] + 1 and len(runs[-1]) * BLOCK_BYTES < RANGE_BYTES:
                runs[-1].append(number)
            else:
                runs.append([number])
        for run, data in zip(runs, self._objects.at_once(self._get, ((run,) for run in runs)), strict=True):
            for place, number in enumerate(run):
                self._blocks[number] = data[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
        while len(self._blocks) > BLOCKS:
            self._blocks.popitem(last=False)

    def _get(self, run: list[int]) -> memoryview:
        part = self._objects.get("", run[0] * BLOCK_BYTES, len(run) * BLOCK_BYTES, self._version)
        if part is None:
            raise TraceUnreachableError(f"{self.url} cannot be read: it was removed")
        return part.data

    def readinto(self, target: memoryview, offset: int) -> int:
        """Read bytes from an offset on; how many there were."""
        done = 0
        while done < len(target):
            number, begin = divmod(offset + done, BLOCK_BYTES)
            block = self._blocks.get(number)
            if block is None:
                self.fetch([(offset + done, min(len(target) - done, RANGE_BYTES))])
                block = self._blocks.get(number, memoryview(b""))
            else:
                self._blocks.move_to_end(number)
            piece = block[begin : begin + len(target) - done]
            if not piece:
                break
            target[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def close(self) -> None:
        """Forget the blocks."""
        self._blocks.clear()
        self._objects.close()


class _Opening(io.RawIOBase):
    """A place in an `ObjectFile`."""

    def __init__(self, file: ObjectFile) -> None:
        self._file = file
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.stat().st_size}[whence]
        )
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(memoryview(buffer).cast("B"), self._place)
        self._place += count
        return count
