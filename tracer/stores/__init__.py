"""What a trace is kept in: named arrays that grow by rows, and JSON attributes, and nothing else.

A store knows no messages. `WriteStore` and `ReadStore` are what writers and readers of traces need of one; a new
store is a module with two such classes and a row in `STORES`. `RowChunks` is the arithmetic that every chunked store
shares: how appended rows fall into chunks.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError, TraceExistsError, TraceFormatError, TraceUnreadableError
from tracer.format.checksum import joined, without_zeros
from tracer.format.names import PART
from tracer.memory import new_memory
from tracer.secrets import masked_urls

CHUNK_LIMIT = 1 << 20
"""Bytes of the largest chunk, save for rows so large that they would fall into more than 64 chunks."""

ALIGNED_BYTES = 1 << 17
"""Chunks of this size begin at a page of their file, which costs at most 3.1 % of the space."""

CHUNKS_AT_ONCE = 32
"""Chunks that are given to be written together, at most."""

STORES: Mapping[str, str] = {
    ".zarr": "tracer.stores.zarr",
    ".h5": "tracer.stores.hdf5",
    ".hdf5": "tracer.stores.hdf5",
}
"""Which module stores traces of which suffix; a module is imported when a store of its suffix is first opened."""

SCHEMES = ("s3", "gs", "az", "http", "https")
"""How the URLs begin that a trace can be at; see `tracer.stores.objects`."""


@dataclass(frozen=True, slots=True)
class Url:
    """Where a trace is that is not on a disk: ``scheme://bucket/key``.

    It is no path, so that nothing takes it for one and makes a folder ``s3:``.
    """

    scheme: str
    bucket: str
    key: str

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """As that of a `Path`."""
        return Path(self.name).suffix

    @property
    def stem(self) -> str:
        """As that of a `Path`."""
        return Path(self.name).stem

    def __truediv__(self, name: str) -> Url:
        return Url(self.scheme, self.bucket, f"{self.key}/{name}")

    def joinpath(self, *names: str) -> Url:
        """As that of a `Path`."""
        return self / "/".join(names)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"


Location = Path | Url
"""Where a trace is."""
Anywhere = str | os.PathLike[str] | Url
"""What `location` takes."""

WRITER = "writer"
"""The only attribute of a root on an object store that was put so that no other process does, and holds nothing yet."""
UNREADABLE = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE})
"""Errors that say nothing about what is there, only that it cannot be read now, or by this user."""
_OF_A_PART = re.compile(rf"(?P<stem>.+)\.(?!rank0\.[^.]+$){PART.pattern}(?P<suffix>\.(?i:h5|hdf5))", re.DOTALL)

Piece = tuple[int, int, int]


class WriteStore(Protocol):
    """A store being written, by one thread of one process."""

    path: Location
    checksums_chunks: bool
    """Whether damaged numbers are noticed by the store itself."""
    seals: bool
    """Whether `seal` ends what `can_create` tells."""
    plainly_compressed: bool
    """Whether the libraries of the format read compressed arrays as they are, without a plugin."""
    unhurried: bool
    """Whether nobody waits for what is written, so that it may take longer if that takes less of the processor; may be
    set at any time, and need not be heeded."""

    @property
    def can_create(self) -> bool:
        """Whether `create` and `set_attrs` still work."""

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
        """Make an empty array.

        Parameters
        ----------
        name : str
            Path of the array; ``/`` separates groups, which are made as needed.
        dtype : str
            Name of a numpy dtype: a bool, integer, float or complex number.
        shape : tuple of int
            Shape of one row, each at least 1; ``()`` for a one-dimensional array.
        chunk_bytes : int
            Bytes of a chunk, at most; a chunk holds at least one row, or part of one row over `CHUNK_LIMIT`.
        compression : str, optional
            Name of a codec of `tracer.stores.codecs.CODECS`; None to store the numbers as they are.
        gapless : bool
            Whether the rows of all calls of `append` must follow each other, and be as many as the store says. If not,
            it may leave out rows at a commit, and say until it is closed that there are more than were appended.

        Raises
        ------
        TraceError
            If the name is taken or cannot be used, or if this store can make no more arrays.
        UnknownNameError
            If there is no such codec.
        """

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        """Append `rows`, an array (n, ...); they are there for readers after the next `commit`.

        Returns the number of the first of them in the array. They follow each other.

        Parameters
        ----------
        name : str
        rows : numpy.ndarray
        checksums : list, optional
            Gets the CRC-32C of the bytes of each row, where the store computes it anyway; else it stays empty.

        Raises
        ------
        TraceError
            If they do not fit the array, or cannot be written (disk full).
        """

    def length(self, name: str) -> int:
        """Rows of an array, with those not yet committed."""

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        """Set attributes (JSON values) of an array or group; ``""`` is the root. They come with the next `commit`."""

    def seal(self) -> None:
        """Say that no array and no attribute will follow where the store needs to know it; `can_create` tells."""

    def commit(self) -> None:
        """Publish everything appended and set so far: it is there for readers and survives ``kill -9``.

        There is no order within one commit; what must not be seen before something else goes into a later one.
        """

    def touch(self) -> None:
        """Let the store look as if it had just been written: a sign of life for readers on other machines."""

    def close(self) -> None:
        """Commit and close. Closing again does nothing."""

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        """Append rows to one array and commit them, after an error and without what was appended to the others.

        As much of the space as can be had of what was not committed is freed for them. Nothing was appended to this
        array since the last commit, and nothing follows but `abandon`.

        Raises
        ------
        TraceError
            If that fails too; what was committed is as it was.
        """

    def abandon(self) -> None:
        """Close the files and write nothing more; for use after an error. Does nothing on a closed store."""

    def discard(self) -> None:
        """Abandon the store and remove its files, because it could not be begun and nothing is in it.

        As far as that goes, and without an error: the one that led here is the one to report. In an object store, which
        is hardly there any more, nothing is removed.
        """


def rows_in(out: NDArray[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of rows in the memory of `out`, where that is large enough, or in new memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    if out is None or out.nbytes < nbytes:
        out = new_memory(nbytes)
    return out[:nbytes].view(dtype).reshape(shape)


class Place(NamedTuple):
    """Where the bytes of a row lie in a file."""

    file: int
    """A descriptor, open for reading."""
    offset: int
    checksummed: bool
    """Whether their CRC-32C follows, in four bytes, the lowest first."""
    owner: object
    """What closes the file when nobody refers to it any more; or None, where the store does."""
    key: tuple[int, int]
    """Of the file: the numbers of its device and its inode."""


def key_of(file: int) -> tuple[int, int]:
    """What no other file has as long as this one is open or mapped."""
    found = os.fstat(file)
    return found.st_dev, found.st_ino


class ReadStore(Protocol):
    """A store being read."""

    path: Location
    checksums_chunks: bool
    verifies: bool
    """Whether `read` compares chunks with their checksums; may be set, and need not be heeded."""
    readers: int
    """How many threads should read at once."""
    problems: list[str]
    """What is wrong with a store that was opened as a damaged one: more may be met when it is read."""

    @property
    def modified(self) -> float:
        """When the store was last written, in seconds since 1970."""

    def parts(self) -> list[str]:
        """Names of the groups that one process each wrote (see `PART`), in any order."""

    def refresh(self) -> None:
        """Look again at a store that is being written: arrays may be there that were not."""

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""

    def names(self, prefix: str = "") -> list[str]:
        """Sorted names of the arrays that begin with `prefix`."""

    def will_open(self, names: Sequence[str]) -> None:
        """Say of which arrays something will be asked next, as `will_read`."""

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Say what `read` will be asked for next by this thread, name, start and stop.

        A store that is far away fetches it at once.
        """

    def length(self, name: str) -> int:
        """Committed rows of an array, looked up anew at each call."""

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of an array."""

    def dtype(self, name: str) -> str:
        """Name of the numpy dtype of an array."""

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
        """Rows ``start`` up to, not including, ``stop``, in `out`, or in memory that nobody else uses.

        May be called by several threads.

        Parameters
        ----------
        name : str
        start, stop : int
        out : numpy.ndarray of uint8, optional
            Contiguous memory of at least the size of the rows, for arrays whose bytes can be read in place; it may be
            left unused.
        checksums : list, optional
            Gets the CRC-32C of the bytes of each row, where the store computes it anyway; else it stays empty.
        verify : bool
            False where the caller compares all that it needs of the rows with checksums of its own, and asks again with
            true where one differs. Need not be heeded.

        Raises
        ------
        TraceCorruptError
            If there are no such rows, or if they fail their checksum.
        """

    def place(self, name: str, row: int) -> Place | None:
        """Where one row lies as it is, in one piece of a file, so that it can be read without asking `read`.

        None where that is not so, is not known, or may not stay so: `read` says what is wrong with a row, if something
        is, and reads it anew where a writer has moved it.

        Raises
        ------
        TraceCorruptError
            If the array is damaged.
        """

    def chunk_rows(self, name: str) -> int:
        """Rows of an array that lie in the same chunks: damage to one of them may reach all of them."""

    def has_chunk(self, name: str, row: int) -> bool:
        """Whether the chunk of a row is there, right or damaged. Rows that a store left out need not be."""

    def stored_rows(self, name: str) -> int:
        """A bound on the rows of an array that can be on disk, however many it says it has."""

    def assume(
        self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int, compression: str | None = None
    ) -> int | None:
        """Take an array whose description is damaged for one that `WriteStore.create` made in this way.

        Returns its rows, at most; None where that is not possible. Its chunks still have to pass their checksums.
        """

    def attrs(self, name: str = "") -> dict[str, Any]:
        """The attributes of an array or group; ``""`` is the root."""

    def close(self) -> None:
        """Close the files. Closing again does nothing."""


def location(path: Anywhere) -> Location:
    """Where a path or a URL leads: a full path, so that it leads there from every working directory.

    Raises
    ------
    TraceFormatError
        If it is a URL that no trace can be at, or a path that the system does not take: too long, or with a null.
    TraceUnreadableError
        If it is a relative path, and the working directory was removed.

    Examples
    --------
    >>> location("s3://bucket/runs/1.zarr"), location("/runs/1.zarr")
    (Url(scheme='s3', bucket='bucket', key='runs/1.zarr'), PosixPath('/runs/1.zarr'))
    """
    if isinstance(path, Url):
        return path
    text = os.fspath(path)
    found = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)(.*)", text, re.DOTALL)
    if found is None or not (found[2] or found[1] in SCHEMES):
        _check_name(text)
        try:
            return Path(path).absolute()
        except FileNotFoundError:
            raise TraceUnreadableError(f"{text} leads nowhere: the working directory was removed") from None
    if not found[2]:
        raise TraceFormatError(f"{text} was a URL before it was made a Path, which joins slashes; give it as text")
    if found[1] not in SCHEMES:
        raise TraceFormatError(f"{text}: a trace can be at a path, or at a URL that begins with one of {SCHEMES}")
    bucket, _, key = found[3].rstrip("/").partition("/")
    web = found[1].startswith("http")
    asks = "?" in key or "#" in key or masked_urls(text) != text
    if "@" in bucket or (asks if web else ":" in bucket):
        raise TraceFormatError(
            f"{text}: the URL of a trace has no query, no fragment and no password; "
            "credentials come from the environment"
        )
    if not bucket or not key or {"", ".", ".."} & set(key.split("/")):
        raise TraceFormatError(f"{text} is no URL of a trace; those are such as {found[1]}://bucket/folder/run.zarr")
    return Url(found[1], bucket, key)


def _check_name(path: str | bytes) -> None:
    try:
        os.lstat(path)
    except ValueError as error:  # it has a null
        raise TraceFormatError(f"{path!r} is no path: {error}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise TraceFormatError(f"{path!r} is no path: {error.strerror}") from None


def exists(path: Location) -> bool:
    """Whether anything is at a path, be it a broken link, or at or below a URL.

    Raises
    ------
    TraceError
        If an object store does not answer.
    """
    return bool(_objects().exists(path)) if isinstance(path, Url) else os.path.lexists(path)


def is_there(path: Path) -> bool:
    """Whether something is at a path, or where a link there leads.

    Raises
    ------
    TraceUnreadableError
        If that cannot be told: a folder on the way may not be entered, or the name is too long.
    """
    try:
        path.stat()
    except ValueError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise TraceUnreadableError(f"cannot read {path}: {error.strerror or error}") from error
    return True


def blank(path: Location) -> bool:
    """Whether all that is at `path` is what a process left that was killed before its part of a store was there."""
    return bool(store_module(path).blank(path))


def remove(url: Url) -> None:
    """Remove all objects of a trace that was just written there.

    Raises
    ------
    TraceError
        If they cannot be removed.
    """
    _objects().remove(url)


def _objects() -> ModuleType:
    return importlib.import_module("tracer.stores.objects")


def store_module(path: Location) -> ModuleType:
    """The module that reads and writes stores with the suffix of `path`; `TraceFormatError` if there is none."""
    name = STORES.get(path.suffix.lower())
    if name is None:
        allowed = ", ".join(STORES)
        raise TraceFormatError(
            f"{path}: the suffix says how a trace is stored; it can be {allowed}, and there is {path.suffix or 'none'}"
        )
    return _objects() if isinstance(path, Url) else importlib.import_module(name)


def check_writable(path: Location) -> None:
    """Raise `TraceFormatError` where no trace can be written, because of the suffix or the kind of URL."""
    module = store_module(path)
    if isinstance(path, Url):
        module.check_writable(path)


def create_store(
    path: Anywhere, *, part: str | None = None, overwrite: bool = False, durable: bool = False
) -> WriteStore:
    """Make a store at `path`, in the format that its suffix names. Parent directories are made.

    Parameters
    ----------
    path : path or URL
    part : str, optional
        Make only this part of a store that other processes write other parts of (see `PART`). A directory may be there
        then, without this part; a file format keeps it in a file of its own beside `path`. The attributes of the root
        are those that were set first.
    overwrite : bool
        Whether a store of this format that is already there is removed first.
    durable : bool
        Whether `WriteStore.commit` waits until the disk has what it publishes, which is then there after a power
        failure too.

    Raises
    ------
    TraceFormatError
        If the suffix is not one of `STORES`.
    TraceExistsError
        If something is at `path` and `overwrite` is false, or if it is not a store of this format.
    TraceError
        If nothing can be written there.
    """
    path = location(path)
    return cast(WriteStore, store_module(path).create(path, part=part, overwrite=overwrite, durable=durable))


def store_files(path: Anywhere) -> list[Location]:
    """The directory, or the files, that the parts of the store at `path` are in; `path` itself if there are none."""
    path = location(path)
    return cast("list[Location]", store_module(path).files(path))


def whole_of(name: str) -> str | None:
    """The name of the trace of which a file is a part by its name, if that is there, too; None for all other names.

    Examples
    --------
    >>> [whole_of(f"run.{part}") for part in ("rank1.h5", "rank0.attempt2.h5", "rank0.h5", "RANK1.h5", "rank1.zarr")]
    ['run.h5', 'run.h5', None, None, None]
    """
    found = _OF_A_PART.fullmatch(name)
    return None if found is None else found["stem"] + found["suffix"]


def part_in(file: str) -> str:
    """The name of the part that a file of a trace has, by its own name, where each part has a file.

    Examples
    --------
    >>> [part_in(file) for file in ("run.h5", "run.rank2.h5", "run.rank0.attempt1.h5")]
    ['rank0', 'rank2', 'rank0.attempt1']
    """
    found = re.search(rf"\.({PART.pattern})\.[^.]+$", file)
    return "rank0" if found is None else found[1]


def refuse_part(path: Location) -> None:
    """Raise `TraceExistsError` if, by its name, what is to be written at `path` would be a part of a trace there."""
    whole = whole_of(path.name)
    if whole is not None and not isinstance(path, Url) and exists(path.with_name(whole)):
        raise TraceExistsError(f"{path} would be a part of {path.with_name(whole)}, by its name; give another one")


def remove_part(path: Anywhere, part: str) -> None:
    """Remove one part of the store at `path`, if it is there.

    Raises
    ------
    TraceError
        If it cannot be removed.
    """
    path = location(path)
    store_module(path).remove_part(path, part)


def open_store(path: Anywhere, *, damaged: bool = False) -> ReadStore:
    """Open the store at `path` for reading, in the format that its suffix names.

    Parameters
    ----------
    path : path or URL
    damaged : bool
        Whether a damaged store is opened too, as far as that is possible. What is unsafe is refused all the same.

    Raises
    ------
    TraceNotFoundError
        If nothing is at `path`.
    TraceFormatError
        If it is not a store of this format, or has parts that a trace never has and that are not safe to read.
    TraceCorruptError
        If it is one but damaged.
    """
    path = location(path)
    return cast(ReadStore, store_module(path).open(path, damaged=damaged))


def open_parts(path: Anywhere, *, damaged: bool = False) -> tuple[list[tuple[str, ReadStore]], dict[str, TraceError]]:
    """Open all parts of the store at `path`, which may be one directory, or a file and others beside it.

    Parameters
    ----------
    path : path or URL
    damaged : bool
        As in `open_store`.

    Returns
    -------
    parts : list of (str, ReadStore)
        Name of each part, and the store that it is in; several may be in one.
    broken : dict of str to TraceError
        Why the others could not be opened.

    Raises
    ------
    TraceError
        As `open_store`, if no part could be opened.
    """
    path = location(path)
    module = store_module(path)
    files = store_files(path)
    parts: list[tuple[str, ReadStore]] = []
    broken: dict[str, TraceError] = {}
    for file in files:
        try:
            store = cast(ReadStore, module.open(file, damaged=damaged))
        except TraceError as error:
            if len(files) == 1:
                raise
            broken[file.name] = error
            continue
        # of a damaged store the names of groups may be lost, too
        found = store.parts() or ([part_in(file.name)] if damaged else [])
        twice = {name for name, _ in parts}.intersection(found)
        if not found or twice:
            store.close()
            why = f"{', '.join(twice)} is in another file, too" if twice else "it has no group rank0"
            broken[file.name] = TraceFormatError(f"{file} is not a trace: {why}")
            continue
        parts += [(name, store) for name in found]
    if not parts:
        raise next(iter(broken.values()))
    return parts, broken


def make_folder(folder: Path, *, durable: bool) -> None:
    """Make a folder, and those above it, unless it is there; if `durable`, the disk has their names."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if durable:
        # one that is there may have been made just now, by another rank
        for one in reversed(new or [folder]):
            sync_folder(one.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of the files in a folder."""
    sync_file(folder)


def sync_file(path: Path | str) -> None:
    """Wait until the disk has what is in a file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_name(name: str) -> None:
    """Raise `TraceError` unless `name` is a path that stays inside a store and that every store can use."""
    for part in name.split("/"):
        if (
            not part
            or part[0] == "."
            or part.startswith("__")
            or part == "zarr.json"
            or "\\" in part
            or not part.isprintable()
            or len(part.encode()) > 255
        ):
            raise TraceError(f"{name!r} cannot be the name of an array, because of its part {part!r}")


def chunk_shape(itemsize: int, shape: tuple[int, ...], chunk_bytes: int) -> tuple[int, ...]:
    """Shape of the chunks of an array whose rows have `shape`.

    A chunk is several whole rows, one row, or a part of one row that is contiguous in it (so it is written without
    being copied together).

    Examples
    --------
    >>> chunk_shape(4, (), 65536), chunk_shape(4, (100,), 65536), chunk_shape(4, (512, 512), 65536)
    ((16384,), (163, 100), (1, 512, 512))
    >>> chunk_shape(4, (3, 1000, 1000), 65536)
    (1, 1, 250, 1000)
    """
    row = itemsize * math.prod(shape)
    limit = largest_chunk(row)
    if row <= limit:
        return (max(1, min(chunk_bytes, limit) // row), *shape)
    chunk = [1]
    rest = row
    for axis, size in enumerate(shape):
        below = rest // size
        if below <= limit:
            pieces = -(-size // (limit // below))
            return (*chunk, -(-size // pieces), *shape[axis + 1 :])
        chunk.append(1)
        rest = below
    raise AssertionError("an item is smaller than the limit")


def largest_chunk(row_nbytes: int) -> int:
    """Bytes of the largest chunk that `chunk_shape` makes of rows of so many bytes."""
    # more than 256 chunks in a row would not leave the index of a shard within one page of 4096 bytes
    return max(CHUNK_LIMIT, -(-row_nbytes // 64))


def walk(shape: tuple[int, ...], chunk: tuple[int, ...], item: int, start: int, stop: int) -> Iterator[Piece]:
    """Where the bytes of rows ``start`` to ``stop`` of an array are in its chunks.

    Every chunk (as `chunk_shape` makes them) is contiguous in its row or rows, so its bytes are one range of the rows'
    bytes; those of a padded chunk at the end of a run are shorter than the chunk.

    Yields
    ------
    number : int
        Of the chunk, in C order over the grid of chunks.
    begin : int
        Where its bytes begin in the bytes of the array's rows.
    length : int
        How many of its bytes are the array's.

    Examples
    --------
    >>> list(walk((10,), (4,), 8, 3, 9))
    [(0, 0, 32), (1, 32, 32), (2, 64, 32)]
    >>> list(walk((2, 3, 5), (1, 2, 5), 1, 1, 2))
    [(2, 15, 10), (3, 25, 5)]
    """
    height = chunk[0]
    row_nbytes = item * math.prod(shape[1:])
    chunk_nbytes = item * math.prod(chunk)
    runs, run_nbytes, per_run = 1, row_nbytes * height, 1
    if height == 1:
        for axis in range(1, len(shape)):
            if chunk[axis] != shape[axis]:
                runs = math.prod(shape[1:axis])
                run_nbytes = row_nbytes // runs
                per_run = -(-run_nbytes // chunk_nbytes)
                if chunk[axis] == 1:
                    continue
                break
    per_height = runs * per_run
    if per_height == 1 and height == 1 and stop == start + 1:  # one large message, as it often is
        yield start, start * row_nbytes, row_nbytes
        return
    for number in range(start // height * per_height, -(-stop // height) * per_height):
        run, part = divmod(number % per_height, per_run)
        begin = number // per_height * height * row_nbytes + run * run_nbytes + part * chunk_nbytes
        yield number, begin, min(chunk_nbytes, run_nbytes - part * chunk_nbytes)


def row_checksums(chunks: Sequence[int], lengths: Sequence[int], chunk_nbytes: int) -> Iterator[int]:
    """The CRC-32C of each of some rows, from those of the chunks that they are cut into.

    Parameters
    ----------
    chunks : sequence of int
        Checksums of the chunks of whole rows, in their order.
    lengths : sequence of int
        Of the chunks of a row, how many bytes of each are the row's; zeros follow them.
    chunk_nbytes : int

    Examples
    --------
    >>> from tracer.format.checksum import crc32c
    >>> [found] = row_checksums([crc32c(b"abcd"), crc32c(b"ef" + bytes(2)), crc32c(b"ghij")], [4, 2, 4], 4)
    >>> found == crc32c(b"abcdefghij")
    True
    """
    for begin in range(0, len(chunks), len(lengths)):
        found = 0
        for checksum, length in zip(chunks[begin : begin + len(lengths)], lengths, strict=True):
            own = without_zeros(checksum, chunk_nbytes - length) if length < chunk_nbytes else checksum
            found = own if len(lengths) == 1 else joined(found, own, length)
        yield found


def rows_ahead(rows: int, least: int) -> int:
    """How many rows the ``zarr.json`` of a pool says there are while it grows: `least`, doubled until all fit.

    Examples
    --------
    >>> rows_ahead(0, 128), rows_ahead(128, 128), rows_ahead(300, 128)
    (128, 128, 512)
    """
    while least < rows:
        least *= 2
    return least


def contiguous(chunk: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether chunks of this shape are whole rows, or contiguous parts of one row."""
    for axis, size in enumerate(chunk):
        if size != 1:
            return chunk[axis + 1 :] == shape[axis + 1 :]
    return True


class RowChunks:
    """Cuts the rows appended to one array into chunks, and keeps those of the last chunk until it is full.

    Chunks are numbered in C order over the grid of chunks.

    Attributes
    ----------
    dtype : numpy.dtype
        Little-endian.
    chunk : tuple of int
        Shape of a chunk.
    grid : tuple of int
        Chunks that a row falls into, along each of its axes.
    per_row : int
        Their product.
    chunk_nbytes : int
    rows : int
        Rows appended so far.
    """

    __slots__ = (
        "_lengths",
        "_name",
        "_row_nbytes",
        "_run",
        "_runs",
        "_tail",
        "_tail_changed",
        "chunk",
        "chunk_nbytes",
        "dtype",
        "grid",
        "per_row",
        "rows",
        "shape",
    )

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.kind not in "biufc" or self.dtype.itemsize > 16:
            raise TraceError(f"array {name!r} cannot have the dtype {dtype}: stores keep numbers of at most 16 bytes")
        if any(size < 1 for size in shape):
            raise TraceError(f"the rows of array {name!r} cannot have the shape {shape}: no axis may be empty")
        self._name = name
        self.shape = shape
        self.chunk = chunk_shape(self.dtype.itemsize, shape, chunk_bytes)
        self.grid = tuple(-(-size // part) for size, part in zip(shape, self.chunk[1:], strict=True))
        self.per_row = math.prod(self.grid)
        self.chunk_nbytes = math.prod(self.chunk) * self.dtype.itemsize
        self.rows = 0
        self._row_nbytes = math.prod(shape) * self.dtype.itemsize
        # a split row is so many runs, each cut into chunks; the last chunk of each run may stick out and is padded
        split = [axis for axis, count in enumerate(self.grid) if count > 1]
        self._run = math.prod(shape[split[-1] :]) * self.dtype.itemsize if split else self._row_nbytes
        self._runs = self._row_nbytes // self._run
        # of each chunk of a row, the bytes that are the row's
        whole = walk((1, *shape), self.chunk, self.dtype.itemsize, 0, 1)
        self._lengths = [length for _, _, length in whole] if self.in_rows else []
        self._tail: bytearray | None = None
        self._tail_changed = False

    def append(self, rows: NDArray[Any], write: Callable[[int, list[memoryview]], None]) -> None:
        """Take `rows` (n, ...), and call `write` with the chunks that are now full, and the number of the first.

        They follow each other, at most `CHUNKS_AT_ONCE` of them. The bytes are valid during the call only.
        """
        if rows.shape[1:] != self.shape or rows.ndim != len(self.shape) + 1:
            raise TraceError(f"rows of shape {rows.shape[1:]} do not fit array {self._name!r} with {self.shape}")
        if rows.dtype != self.dtype:
            raise TraceError(f"rows of dtype {rows.dtype} do not fit array {self._name!r} with {self.dtype}")
        count = len(rows)
        if not count:
            return
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        height, nbytes = self.chunk[0], self._row_nbytes
        position = 0
        while position < count:
            filled = self.rows % height
            begin = position * nbytes
            if filled or count - position < height:
                take = min(height - filled, count - position)
                if self._tail is None:
                    self._tail = bytearray(self.chunk_nbytes)
                self._tail[filled * nbytes : (filled + take) * nbytes] = data[begin : begin + take * nbytes]
                self._tail_changed = True
                if filled + take == height:
                    write(self.rows // height, [memoryview(self._tail)])
                    # a new buffer, so that what follows the last row is zeros and not rows of the chunk before
                    self._tail = None
                    self._tail_changed = False
            elif self.per_row > 1:
                take = 1
                pieces = self._split(data[begin : begin + nbytes])
                for first in range(0, self.per_row, CHUNKS_AT_ONCE):
                    write(self.rows * self.per_row + first, pieces[first : first + CHUNKS_AT_ONCE])
            else:
                whole = min((count - position) // height, CHUNKS_AT_ONCE)
                take, size = whole * height, height * nbytes
                write(self.rows // height, [data[at : at + size] for at in range(begin, begin + whole * size, size)])
            self.rows += take
            position += take

    @property
    def in_rows(self) -> bool:
        """Whether each chunk is one row, or a part of one."""
        return bool(self.shape) and self.chunk[0] == 1

    def row_checksums(self, chunks: Sequence[int]) -> Iterator[int]:
        """The CRC-32C of each of some rows, from those of their chunks, in the order of `append`; see `in_rows`."""
        return row_checksums(chunks, self._lengths, self.chunk_nbytes)

    def _split(self, row: memoryview) -> list[memoryview]:
        pieces = []
        for run in range(self._runs):
            end = (run + 1) * self._run
            for start in range(run * self._run, end, self.chunk_nbytes):
                piece = row[start : min(start + self.chunk_nbytes, end)]
                if len(piece) < self.chunk_nbytes:
                    piece = memoryview(bytes(piece) + bytes(self.chunk_nbytes - len(piece)))
                pieces.append(piece)
        return pieces

    def skip(self, row: int) -> None:
        """Go on with this row, the first of a chunk, and leave out those before it."""
        self.rows = row
        self._tail = None
        self._tail_changed = False

    def take_tail(self) -> tuple[int, memoryview] | None:
        """Number and bytes of the last chunk, padded with zeros, if it is not full and changed since the last call."""
        if not self._tail_changed or self._tail is None:
            return None
        self._tail_changed = False
        return self.rows // self.chunk[0], memoryview(self._tail)
