"""What a launcher can say with environment variables, where it cannot change the training script.

==================  ============================================================================================
``TRACE_DISABLE``   ``1``: `tracer.record` and ``trace record`` record nothing, and the training runs as without them
``TRACE_PATH``      where `tracer.record` writes its trace, instead of the path that the script gives
``TRACE_MAX_BYTES`` the most that either may write (``500MB``, ``2GiB``); of two bounds the smaller one holds
==================  ============================================================================================

Every option of ``trace record`` has a variable too, ``TRACE_RECORD_`` and its name; see its ``--help``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

from tracer.errors import CaptureError

DISABLE, PATH, MAX_BYTES = "TRACE_DISABLE", "TRACE_PATH", "TRACE_MAX_BYTES"
REHEARSAL = "TRACE_REHEARSAL"
"""Set to ``certify`` or ``dry-run`` in a script that runs only for its first steps, so that it can tell."""

Given = TypeVar("Given")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip


def size_of(text: str | int) -> int:
    """A number of bytes, written as people write it.

    Raises
    ------
    CaptureError
        If it is none, or less than one byte.

    Examples
    --------
    >>> size_of("500MB"), size_of("1.5GiB"), size_of("64 kB"), size_of(1000)
    (500000000, 1610612736, 64000, 1000)
    """
    count = 0
    if isinstance(text, str):
        words = text.strip()
        digits = words.rstrip("kKmMgGtTiIbB")
        unit = words[len(digits) :].lower().removesuffix("b")
        try:
            count = int(float(digits) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            count = 0
    elif type(text) is int:
        count = text
    if count < 1:
        raise CaptureError(f"{text!r} is not a size such as 500000, 256MB or 1.5GiB")
    return count


def disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``TRACE_DISABLE`` turns recording off.

    Raises
    ------
    CaptureError
        If it says neither yes nor no.

    Examples
    --------
    >>> disabled({}), disabled({"TRACE_DISABLE": "1"}), disabled({"TRACE_DISABLE": "no"})
    (False, True, False)
    """
    value = environment.get(DISABLE, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise CaptureError(f"the environment variable {DISABLE} is {value!r}; 1 turns recording off, and 0 leaves it on")


def path_or(given: Given, environment: Mapping[str, str] = os.environ) -> Given | str:
    """What ``TRACE_PATH`` says, else the path that was given."""
    return environment.get(PATH) or given


def bound_or(given: int | None, environment: Mapping[str, str] = os.environ) -> int | None:
    """The smaller of a bound that was given and that of ``TRACE_MAX_BYTES``.

    Raises
    ------
    CaptureError
        If the variable is not a size.
    """
    value = environment.get(MAX_BYTES)
    if not value:
        return given
    try:
        bound = size_of(value)
    except CaptureError as error:
        raise CaptureError(f"the environment variable {MAX_BYTES} is no bound: {error}") from None
    return bound if given is None else min(given, bound)
