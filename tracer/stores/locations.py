"""Where traces are: paths and URLs, and what the names of their files say."""

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
"""How the URLs begin that a trace can be at; see `tracer.stores.objects`."""


@dataclass(frozen=True, slots=True)
class Url:
    """Where a trace on an object store or an http server is: ``scheme://bucket/key``.

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

    @property
    def is_web(self) -> bool:
        """Whether it leads to an http server, which gives what it is asked for and has no lists."""
        return self.scheme.startswith("http")

    def __truediv__(self, name: str) -> Url:
        return Url(self.scheme, self.bucket, f"{self.key}/{name}")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"


Location = Path | Url
"""Where a trace is."""
Anywhere = str | os.PathLike[str] | Url
"""What `location` takes."""
FIRST_PART = "rank0"
"""The part that the file at a trace's path holds, where each part has a file."""
_OF_A_PART = re.compile(rf"(?P<stem>.+)\.(?!rank0\.[^.]+$){PART.pattern}(?P<suffix>\.(?i:h5|hdf5))", re.DOTALL)


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
    except ValueError as error:  # it has a null character
        raise TraceFormatError(f"{path!r} is no path: {error}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise TraceFormatError(f"{path!r} is no path: {error.strerror}") from None


def whole_of(name: str) -> str | None:
    """The name of the trace of which a file is a part by its name, if that is there, too; None for all other names.

    Examples
    --------
    >>> [whole_of(f"run.{part}") for part in ("rank1.h5", "rank0.attempt2.h5", "rank0.h5", "RANK1.h5", "rank1.zarr")]
    ['run.h5', 'run.h5', None, None, None]
    """
    found = _OF_A_PART.fullmatch(name)
    return None if found is None else found["stem"] + found["suffix"]


def beside(path: Location, names: Iterable[str]) -> list[str]:
    """Those of some names of files that are of other parts of the trace at `path`, by rank and attempt.

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
    """The name of the part that a file of a trace has, by its own name, where each part has a file.

    Examples
    --------
    >>> [part_in(file) for file in ("run.h5", "run.rank2.h5", "run.rank0.attempt1.h5")]
    ['rank0', 'rank2', 'rank0.attempt1']
    """
    found = re.search(rf"\.({PART.pattern})\.[^.]+$", file)
    return FIRST_PART if found is None else found[1]
