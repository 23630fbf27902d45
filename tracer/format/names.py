"""Names inside a trace, of parts, tables and pools, and the name and version of the format itself.

`docs/trace-format.md` describes the same rules with their reasons. Change both together, and raise `VERSION` if an
older reader would misread the result.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from tracer.errors import TraceCorruptError, TraceError, TraceFormatError
from tracer.messaging.messages import DEFAULT_TAG

FORMAT = "tracereel"
"""The root attribute ``format`` of every trace."""
VERSION = 1
"""The root attribute ``format_version``, raised when older readers would misread the format."""


def check_root(root: Mapping[str, Any], part: Callable[[], Mapping[str, Any]], *, doubt_version: bool = False) -> None:
    """Check the root attributes of a store that has parts.

    Parameters
    ----------
    root : mapping
    part : callable
        Returns the attributes of a part's group, which show whether the root is damaged or the store is no trace.
    doubt_version : bool
        Whether to suspect damage also if only the version is wrong.

    Raises
    ------
    TraceFormatError
        If the store is no trace, or has a version that this release does not read.
    TraceCorruptError
        If the attributes of the part are those of a trace of this version, and those of the root are not.
    """
    try:
        check_version(root)
    except TraceFormatError as error:
        if not doubt_version and root.get("format") == FORMAT and isinstance(root.get("format_version"), int):
            raise
        try:
            check_version(part())
        except TraceError:
            raise error from None
        raise TraceCorruptError(f"the attributes of its root are not as they were: {error}") from None


def check_version(attributes: Mapping[str, Any]) -> None:
    """Check the root attributes of a store.

    Raises
    ------
    TraceFormatError
        If the attributes are not those of a trace, or name a version that this release does not read.
    """
    if attributes.get("format") != FORMAT:
        raise TraceFormatError(f"it is not a trace: its root has no attribute format = {FORMAT!r}")
    found = attributes.get("format_version")
    if found != VERSION or isinstance(found, bool):
        raise TraceFormatError(f"it has the trace format {found!r}, and this release reads {VERSION}")


PART = re.compile(r"rank(?P<rank>0|[1-9][0-9]{0,8})(\.attempt(?P<attempt>[1-9][0-9]{0,8}))?")
"""The name of a part: the group that one process writes. A directory holds all parts, a file one: see `open_parts`."""

RESERVED = frozenset({"journal", "declarations", "pools", "late"})
"""Names in a part's group that a kind cannot use."""


def part_name(rank: int, attempt: int = 0) -> str:
    """The name of the part of a rank and attempt.

    Examples
    --------
    >>> part_name(0), part_name(3, attempt=1)
    ('rank0', 'rank3.attempt1')
    """
    return f"rank{rank}.attempt{attempt}" if attempt else f"rank{rank}"


def part_of(name: str) -> tuple[int, int] | None:
    """Rank and attempt of the part with this name; None if it is no name of a part.

    Examples
    --------
    >>> part_of("rank3.attempt1"), part_of("rank0"), part_of("rank01"), part_of("rank0.attempt0")
    ((3, 1), (0, 0), None, None)
    """
    match = PART.fullmatch(name)
    return None if match is None else (int(match["rank"]), int(match["attempt"] or 0))


def rank_and_attempt(part: str) -> tuple[int, int]:
    """Rank and attempt of a part; raises `ValueError` for any other name."""
    found = part_of(part)
    if found is None:
        raise ValueError(f"{part!r} is no name of a part")
    return found


def journal_name(part: str) -> str:
    """The name of a part's journal."""
    return f"{part}/journal"


def declarations_name(part: str) -> str:
    """The name of a part's array of declarations."""
    return f"{part}/declarations"


_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]|^\.|\.$|^_(?=_)|\.(?=json$)")
_LONGEST = 200


def quote(name: str) -> str:
    """Quote a kind, tag, module or leaf as a component of an array's path; different names stay different.

    Every byte but ASCII letters, digits, ``.``, ``_`` and ``-`` becomes ``%`` and two hex digits. So do a leading or
    trailing ``.``, the first ``_`` of a leading ``__``, and the dot of a trailing ``.json``. The empty name (the root
    module) becomes ``%~root``. Names over 200 bytes are cut, and end in ``%~`` and a hash.

    Examples
    --------
    >>> quote("layer1.0.conv1"), quote("../a b%"), quote(""), quote("__init__"), quote("zarr.json")
    ('layer1.0.conv1', '%2E.%2Fa%20b%25', '%~root', '%5F_init__', 'zarr%2Ejson')
    >>> len(quote("x" * 999))
    200
    """
    if not name:
        return "%~root"
    raw = name.encode("utf-8", "surrogatepass")
    quoted = _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], raw).decode("ascii")
    return _cut(quoted, raw)


def _cut(quoted: str, raw: bytes) -> str:
    """Replace the end of a quoted name that is too long for a file name by a hash of `raw`."""
    if len(quoted) > _LONGEST:
        quoted = f"{quoted[: _LONGEST - 22]}%~{hashlib.sha256(raw).hexdigest()[:20]}"
    return quoted


def own_pool(part: str, kind: str, module: str | None, tag: str, leaf: str) -> str:
    """The name of the pool of one stream: ``{part}/{kind}/{module}``, with ``@{tag}`` and ``#{leaf}`` where needed.

    Streams of the network have ``%~network`` in place of the module.

    Examples
    --------
    >>> own_pool("rank0", "activations", "layer1.0", "default", ""), own_pool("rank0", "input_data", None, "eval", "")
    ('rank0/activations/layer1.0', 'rank0/input_data@eval/%~network')
    >>> own_pool("rank1", "activations", "rnn", "default", "1.0"), own_pool("rank0", "journal", "", "default", "")
    ('rank1/activations/rnn#1.0', 'rank0/%~journal/%~root')
    """
    group = f"%~{kind}" if kind in RESERVED else quote(kind)
    if tag != DEFAULT_TAG:
        # two names of 200 bytes together exceed the limit of a file name
        group = f"{group}@{quote(tag)}"
        group = _cut(group, group.encode())
    name = "%~network" if module is None else quote(module)
    if leaf:
        name = f"{name}#{quote(leaf)}"
        name = _cut(name, name.encode())
    return f"{part}/{group}/{name}"


def shared_pool(part: str, kind: str, storage: str) -> str:
    """The name of the pool that all small or ragged messages of a kind and storage dtype share."""
    return f"{part}/pools/{quote(kind)}/{storage}"
