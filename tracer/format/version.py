"""The name and version of the format, and what a root must say to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tracer.errors import TraceCorruptError, TraceError, TraceFormatError

FORMAT = "tracereel"
"""Root attribute ``format``: what makes a store a trace."""
VERSION = 1
"""Root attribute ``format_version``: an integer, raised when older readers would go wrong."""


def check_root(root: Mapping[str, Any], part: Callable[[], Mapping[str, Any]], *, doubt_version: bool = False) -> None:
    """Check the attributes of the root of a store that has parts.

    Parameters
    ----------
    root : mapping
    part : callable
        Returns the attributes of the group of a part, which tell a damaged root from one of something else.
    doubt_version : bool
        Whether another version, too, may be what became of this one.

    Raises
    ------
    TraceFormatError
        If it is no trace, or of a version that this release does not read.
    TraceCorruptError
        If a part says that it is a trace of this version, and the root does not.
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
        If they are not those of a trace, or of a version that this release does not read.
    """
    if attributes.get("format") != FORMAT:
        raise TraceFormatError(f"it is not a trace: its root has no attribute format = {FORMAT!r}")
    found = attributes.get("format_version")
    if found != VERSION or isinstance(found, bool):
        raise TraceFormatError(f"it has the trace format {found!r}, and this release reads {VERSION}")
