"""Finds the traces that are named by paths, globs, folders, URLs and lists of these in files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from tracer.errors import CaptureError, TraceNotFoundError, TraceUnreadableError, warn_only
from tracer.format.names import FORMAT
from tracer.stores.disk import is_there
from tracer.stores.locations import SCHEMES, Anywhere, Url, final_of, location, whole_of
from tracer.stores.opening import STORES
from tracer.stores.zarr.on_disk import read_document

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
        Paths as they are given, or below the folder as it is given. A trace to which links lead, too, is named once, by
        the path that has no link if there is one.

    Warns
    -----
    RuntimeWarning
        If a folder below a given folder cannot be listed; its traces are left out.

    Raises
    ------
    CaptureError
        If a source names no trace, or a list lists itself.
    TraceNotFoundError
        If a list, or a path that is not in a list, does not exist. Paths in lists are checked in planning.
    """
    if isinstance(sources, (str, os.PathLike, Url)):
        sources = [sources]
    found: dict[str, str] = {}
    without = None if outside is None else location(outside)
    for source in sources:
        for trace in _meant(source, ()):
            if not _inside(trace, without):
                found.setdefault(_itself(trace), trace)
    if not found:
        raise CaptureError("a batch needs at least one trace, but got none")
    return list(found.values())


def _itself(trace: str) -> str:
    """A URL, or the path of a trace without links."""
    return trace if "://" in trace else os.path.realpath(trace)


def _once(paths: Iterable[str]) -> list[str]:
    """Each trace once, sorted; of several paths of a trace, the path with the fewest links."""

    def links(path: str) -> int:
        return sum(one.is_symlink() for one in (Path(path), *Path(path).parents))

    found: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: (links(path), path)):
        found.setdefault(_itself(path), path)
    return sorted(found.values(), key=lambda path: Path(path).parts)


def _meant(source: Anywhere, lists: tuple[str, ...]) -> Iterator[str]:
    text = str(source) if isinstance(source, Url) else os.fspath(source)
    if text.startswith("@") and not os.path.exists(text):
        yield from _listed(text[1:], lists)
        return
    if "://" in text and text.partition("://")[0] in SCHEMES:
        yield from _at_url(text)
        return
    text = final_of(text)
    path = Path(text)
    there = is_there(path) or is_there(Path(f"{text}.zarr"))
    if path.suffix.lower() in SUFFIXES and (there or (lists and not GLOB.intersection(text))):
        yield text
    elif os.path.isdir(text):
        below = _once(_below(text))
        if not below:
            raise CaptureError(
                f"there is no trace in the folder {text}: none of its names ends in {', '.join(SUFFIXES)}"
            )
        yield from below
    elif GLOB.intersection(text):
        # an HDF5 trace whose run has not ended is a folder beside its path
        folders = [one for one in _matching(f"{text}.zarr") if final_of(one) != one]
        matches = [final_of(one) for one in (*_matching(text), *folders)]
        traces = _once(one for one in matches if Path(one).suffix.lower() in SUFFIXES and not _is_part(Path(one)))
        if not traces:
            raise CaptureError(f"no trace matches {text}" + (f", but {len(matches)} other files do" if matches else ""))
        yield from traces
    elif is_there(path):
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


def _below(folder: str) -> Iterator[str]:
    """The traces in a folder and its subfolders; Zarr arrays and groups of other formats are left out."""
    for _, entries in _folders(folder):
        for entry in entries:
            path = Path(entry.path)
            if path.suffix.lower() in SUFFIXES and not _is_part(path) and not _is_other(path):
                yield final_of(str(path))


def _folders(top: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Each folder at or below `top` once, whatever links lead to it, with its entries; traces are no folders.

    Links are followed after all other folders, and not to a folder that holds `top`.
    """
    above = {_key(one) for one in Path(os.path.realpath(top)).parents}
    seen: set[tuple[int, int]] = set()
    folders: list[str] = [top]
    links: list[str] = []
    while folders or links:
        folder = (folders or links).pop()
        try:
            key = _key(folder)
            with os.scandir(folder) as scanned:
                entries = [one for one in scanned if not one.name.startswith(".")]
        except OSError as error:
            why = f"the folder {folder} cannot be listed: {error.strerror or error}"
            if folder == top:
                raise TraceUnreadableError(why) from error
            warn_only(f"{why}; traces in it are left out", stacklevel=2)
            continue
        if key in seen or key in above:
            continue
        seen.add(key)
        entries.sort(key=lambda one: one.name)
        yield folder, entries
        for entry in reversed(entries):
            if Path(entry.name).suffix.lower() not in SUFFIXES and os.path.isdir(entry.path):
                (links if entry.is_symlink() else folders).append(entry.path)


def _key(folder: str | Path) -> tuple[int, int]:
    """Device and inode number of a folder."""
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def _matching(pattern: str) -> Iterator[str]:
    """The paths that match a glob; its ``**`` visits each folder once, as `_folders` does."""
    before, recursive, after = f"{pattern}/*".partition("**/") if pattern.endswith("**") else pattern.partition("**/")
    if not recursive:
        yield from glob.glob(pattern)
        return
    for start in glob.glob(before) if before else ["."]:
        for folder, _ in _folders(start):
            there = "" if folder == "." and not before else folder.removeprefix("" if before else "./")
            yield from _matching(os.path.join(glob.escape(there), after))


def _is_part(path: Path) -> bool:
    """Whether a file is a part of a trace in the same folder: ``run.rank1.h5`` belongs to ``run.h5``."""
    whole = whole_of(path.name)
    return whole is not None and os.path.exists(path.with_name(whole))


def _is_other(path: Path) -> bool:
    """Whether a path is a Zarr group or array of another format, rather than a trace or a damaged trace."""
    try:
        document = read_document(path) if os.path.isdir(path) else {}
    except TraceUnreadableError:
        return False
    attributes = document.get("attributes", {})
    return bool(document) and isinstance(attributes, dict) and attributes.get("format") != FORMAT


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
    from tracer.stores.objects import Objects  # imported here, because obstore may not be installed

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
