"""Paths and URLs of traces, and the names of part files."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tracer.errors import TraceFormatError, TraceUnreadableError
from tracer.format.names import PART
from tracer.secrets import masked_urls

SCHEMES = ("s3", "gs", "az", "http", "https")
"""The URL schemes that are supported; see `tracer.stores.objects`."""


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of a trace on an object store or HTTP server: ``scheme://bucket/key``.

    Not a `Path`, so that no code creates a folder ``s3:`` by mistake.
    """

    scheme: str
    bucket: str
    key: str

    @property
    def name(self) -> str:
        """The last component of the key."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """As `Path.suffix`."""
        return Path(self.name).suffix

    @property
    def stem(self) -> str:
        """As `Path.stem`."""
        return Path(self.name).stem

    @property
    def is_web(self) -> bool:
        """Whether the URL is of an HTTP server, which cannot list its files."""
        return self.scheme.startswith("http")

    def __truediv__(self, name: str) -> Url:
        return Url(self.scheme, self.bucket, f"{self.key}/{name}")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"


Location = Path | Url
"""The place of a trace."""
Anywhere = str | os.PathLike[str] | Url
"""A path or URL in any form that `location` accepts."""
FIRST_PART = "rank0"
"""The part in the file at a trace's own path, in formats with a file per part."""
_OF_A_PART = re.compile(rf"(?P<stem>.+)\.(?!rank0\.[^.]+$){PART.pattern}(?P<suffix>\.(?i:h5|hdf5))", re.DOTALL)


def location(path: Anywhere) -> Location:
    """Convert to an absolute path, which does not depend on the working directory, or to a `Url`.

    Raises
    ------
    TraceFormatError
        If the URL cannot be that of a trace, or the path is too long or has a null character.
    TraceUnreadableError
        If the path is relative, and the working directory was removed.

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
    except ValueError as error:  # a null character in the path
        raise TraceFormatError(f"{path!r} is no path: {error}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise TraceFormatError(f"{path!r} is no path: {error.strerror}") from None


def whole_of(name: str) -> str | None:
    """The name of the trace that a file would belong to if it is named like a part file; None for other names.

    Examples
    --------
    >>> [whole_of(f"run.{part}") for part in ("rank1.h5", "rank0.attempt2.h5", "rank0.h5", "RANK1.h5", "rank1.zarr")]
    ['run.h5', 'run.h5', None, None, None]
    """
    found = _OF_A_PART.fullmatch(name)
    return None if found is None else found["stem"] + found["suffix"]


def final_of(path: str) -> str:
    """The path of a trace that is recorded in a folder: ``run.h5`` for ``run.h5.zarr``; any other path as it is.

    Examples
    --------
    >>> final_of("run.h5.zarr"), final_of("run.zarr"), final_of("run.h5")
    ('run.h5', 'run.zarr', 'run.h5')
    """
    return path.removesuffix(".zarr") if path.lower().endswith((".h5.zarr", ".hdf5.zarr")) else path


def beside(path: Location, names: Iterable[str]) -> list[str]:
    """The names among `names` of other part files of the trace at `path`, sorted by rank and attempt.

    Examples
    --------
    >>> beside(Path("run.h5"), ["run.h5", "run.rank2.h5", "run.rank1.h5", "run.rank0.h5", "other.rank1.h5"])
    ['run.rank1.h5', 'run.rank2.h5']
    """
    front = f"{path.stem}."
    found = []
    for name in names:
        if name.startswith(front) and name.endswith(path.suffix):
            part = PART.fullmatch(name[len(front) : len(name) - len(path.suffix)])
            if part is not None and part[0] != FIRST_PART:
                found.append((int(part["rank"]), int(part["attempt"] or 0), name))
    return [name for _, _, name in sorted(found)]


def part_in(file: str) -> str:
    """The part that a file holds, by the file's name, in formats with a file per part; or a folder that is a part.

    Examples
    --------
    >>> [part_in(file) for file in ("run.h5", "run.rank2.h5", "run.rank0.attempt1.h5", "rank3")]
    ['rank0', 'rank2', 'rank0.attempt1', 'rank3']
    """
    found = PART.fullmatch(file) or re.search(rf"\.({PART.pattern})\.[^.]+$", file)
    return FIRST_PART if found is None else found[0].strip(".").removesuffix(Path(file).suffix)
