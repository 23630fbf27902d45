"""Finds the traces that are named by paths, globs, folders, URLs and lists of these in files."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from tracer.errors import CaptureError, TraceNotFoundError, TraceUnreadableError
from tracer.format.version import FORMAT
from tracer.stores.locations import SCHEMES, Anywhere, Url, location, whole_of
from tracer.stores.opening import STORES

GLOB: Final = frozenset("*?[")
SUFFIXES: Final = tuple(STORES)
_COMMENT: Final = re.compile(r"(^|[ \t])#.*", re.DOTALL)


def find_traces(sources: Anywhere | Iterable[Anywhere], *, outside: Anywhere | None = None) -> list[str]:
    """The traces that the sources name, each once, in their order.

    Parameters
    ----------
    sources : path, URL or iterable of them
        A trace; a glob (``runs/*.zarr``, ``runs/**/*.h5``; in a URL only its last part may be a glob); a folder or its
        URL, which stands for all traces below it; or ``@list.txt``, a UTF-8 file with a source on each line. Lines end
        with LF or CRLF. A ``#`` at the start of a line, or after a space or a tab, begins a comment; anywhere else it
        is part of the name.
    outside : path or URL, optional
        A folder whose traces are left out, such as the folder of the results.

    Returns
    -------
    list of str
        Paths as they are given, or below the folder as it is given.

    Raises
    ------
    CaptureError
        If a source names no trace, or a list lists itself.
    TraceNotFoundError
        If a list, or a path that is not in a list, does not exist. Paths in lists are checked in planning.
    """
    if isinstance(sources, (str, os.PathLike, Url)):
        sources = [sources]
    found: dict[str, None] = {}
    without = None if outside is None else location(outside)
    for source in sources:
        for trace in _meant(source, ()):
            if not _inside(trace, without):
                found.setdefault(trace)
    if not found:
        raise CaptureError("a batch needs at least one trace, but got none")
    return list(found)


def _meant(source: Anywhere, lists: tuple[str, ...]) -> Iterator[str]:
    text = str(source) if isinstance(source, Url) else os.fspath(source)
    if text.startswith("@") and not Path(text).exists():
        yield from _listed(text[1:], lists)
        return
    if "://" in text and text.partition("://")[0] in SCHEMES:
        yield from _at_url(text)
        return
    path = Path(text)
    if path.suffix.lower() in SUFFIXES and (path.exists() or (lists and not GLOB.intersection(text))):
        yield text
    elif path.is_dir():
        below = list(_below(path))
        if not below:
            raise CaptureError(
                f"there is no trace in the folder {text}: none of its names ends in {', '.join(SUFFIXES)}"
            )
        yield from below
    elif GLOB.intersection(text):
        matches = sorted(glob.glob(text, recursive=True))
        traces = [match for match in matches if Path(match).suffix.lower() in SUFFIXES and not _is_part(Path(match))]
        if not traces:
            raise CaptureError(f"no trace matches {text}" + (f", but {len(matches)} other files do" if matches else ""))
        yield from traces
    elif path.exists():
        raise CaptureError(
            f"{text} is neither a trace (its name would end in {', '.join(SUFFIXES)}) nor a folder; "
            f"a file that lists traces is given as @{text}"
        )
    else:
        raise TraceNotFoundError(f"there is no trace at {text}")


def _listed(name: str, lists: tuple[str, ...]) -> Iterator[str]:
    if name in lists:
        raise CaptureError(f"the list of traces {name} lists itself")
    try:
        # split at \n only, because a name may have other characters that `str.splitlines` splits at; utf-8-sig drops a
        # byte order mark
        lines = Path(name).read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceNotFoundError(f"the list of traces {name} cannot be read: {why}") from error
    for line in lines:
        entry = _COMMENT.sub("", line.removesuffix("\r"), count=1).strip(" \t")
        if entry:
            yield from _meant(entry, (*lists, name))


def _below(folder: Path) -> Iterator[str]:
    """The traces in a folder and its subfolders; Zarr arrays and groups of other formats are left out."""
    try:
        entries = sorted(os.scandir(folder), key=lambda one: one.name)
    except PermissionError as error:
        raise TraceUnreadableError(f"the folder {folder} cannot be listed: {error.strerror}") from error
    for entry in entries:
        path = Path(entry.path)
        suffix = path.suffix.lower()
        if entry.name.startswith("."):
            continue
        if suffix in SUFFIXES:
            if not _is_part(path) and not _is_other(path):
                yield str(path)
        elif entry.is_dir():
            yield from _below(path)


def _is_part(path: Path) -> bool:
    """Whether a file is a part of a trace in the same folder: ``run.rank1.h5`` belongs to ``run.h5``."""
    whole = whole_of(path.name)
    return whole is not None and path.with_name(whole).exists()


def _is_other(path: Path) -> bool:
    """Whether a path is a Zarr group or array of another format, rather than a trace or a damaged trace."""
    if not path.is_dir():
        return False
    try:
        document = json.loads((path / "zarr.json").read_text(encoding="utf-8"))
        return bool(document.get("attributes", {}).get("format") != FORMAT)
    except (OSError, ValueError, AttributeError):
        return False


def _at_url(text: str) -> Iterator[str]:
    url = location(text)
    assert isinstance(url, Url)
    if url.suffix.lower() in SUFFIXES and not GLOB.intersection(text):
        yield str(url)
        return
    if GLOB.intersection(url.key):
        folder, _, pattern = url.key.rpartition("/")
        if not folder or GLOB.intersection(folder):
            raise CaptureError(f"{text}: in a URL a glob is in the last part, below a folder")
        parent = Url(url.scheme, url.bucket, folder)
        traces = [one for one in _below_url(parent, deep=False) if fnmatchcase(one.rpartition("/")[2], pattern)]
    else:
        traces = list(_below_url(url))
    if not traces:
        raise CaptureError(f"there is no trace at {text}")
    yield from traces


def _below_url(url: Url, *, deep: bool = True) -> Iterator[str]:
    if url.is_web:
        raise CaptureError(f"{url}: an http server has no list of what is there; name each trace")
    from tracer.stores.objects.client import Objects  # imported here, because obstore may not be installed

    with closing(Objects(url)) as objects:
        names = sorted(objects.names())
    for name in names:
        if Path(name).suffix.lower() in SUFFIXES:
            if whole_of(name) not in names:
                yield str(url / name)
        elif deep and "." not in name:
            yield from _below_url(url / name)


def _inside(trace: str, folder: Path | Url | None) -> bool:
    if folder is None:
        return False
    place = location(trace)
    if isinstance(place, Url) or isinstance(folder, Url):
        return str(place).startswith(f"{folder}/")
    return Path(os.path.normpath(place)).is_relative_to(os.path.normpath(folder))
