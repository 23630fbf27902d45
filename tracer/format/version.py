"""Name and version of the format, and the check of the root's attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tracer.errors import TraceCorruptError, TraceError, TraceFormatError

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
