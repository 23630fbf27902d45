"""Environment variables through which a launcher controls recording without changing the training script.

==================  ============================================================================================
``TRACE_DISABLE``   ``1``: `tracer.record` and ``trace record`` record nothing, and the training runs as without them
``TRACE_PATH``      where `tracer.record` writes its trace, instead of the path that the script gives
``TRACE_MAX_BYTES`` the most that either may write (``500MB``, ``2GiB``); the smaller of two bounds holds. Messages
                    become rarer to stay within it, unless ``stop_at_bytes`` is given: then the recording ends
==================  ============================================================================================

Every option of ``trace record`` has a variable too, ``TRACE_RECORD_`` and the option's name; see its ``--help``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import TypeVar

from tracer.errors import CaptureError

DISABLE, PATH, MAX_BYTES = "TRACE_DISABLE", "TRACE_PATH", "TRACE_MAX_BYTES"
REHEARSAL = "TRACE_REHEARSAL"
"""Set to ``certify`` or ``dry-run`` where a script runs for its first steps only, so that the script can tell."""

Given = TypeVar("Given")

_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip


def size_of(text: str | int, least: int = 1) -> int:
    """The number of bytes in a text such as ``"500MB"``.

    Raises
    ------
    CaptureError
        If the text is not a size, or the size is less than `least`.

    Examples
    --------
    >>> size_of("500MB"), size_of("1.5GiB"), size_of("64 kB"), size_of(1000)
    (500000000, 1610612736, 64000, 1000)
    """
    count = -1
    if isinstance(text, str):
        words = text.strip()
        digits = words.rstrip("kKmMgGtTiIbB")
        unit = words[len(digits) :].lower().removesuffix("b")
        try:
            count = int(float(digits) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            count = -1
    elif type(text) is int:
        count = text
    if count < least:
        raise CaptureError(f"{text!r} is not a size such as 500000, 256MB or 1.5GiB")
    return count


def share_of(text: str | float) -> float:
    """The share in a number, or in a text such as ``"3%"``.

    Raises
    ------
    CaptureError
        If the text is not a share, or the share is not above 0 and at most 1.

    Examples
    --------
    >>> share_of("3%"), share_of("0.5 %"), share_of("0.03"), share_of(0.03)
    (0.03, 0.005, 0.03, 0.03)
    """
    share = 0.0
    if isinstance(text, str):
        words = text.strip()
        try:
            share = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
        except ValueError:
            share = 0.0
    elif type(text) in (int, float):
        share = float(text)
    if not 0 < share <= 1:
        raise CaptureError(f"{text!r} is not a share such as 3% or 0.03, above 0 and at most 100%")
    return share


def disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``TRACE_DISABLE`` turns recording off.

    Raises
    ------
    CaptureError
        If the variable is neither a yes nor a no.

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
    """The value of ``TRACE_PATH``, else the given path."""
    return environment.get(PATH) or given


def bounds_or(
    max_bytes: int | None, stop_at_bytes: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[int | None, int | None]:
    """Both bounds of a trace, lowered to ``TRACE_MAX_BYTES``.

    The variable bounds `stop_at_bytes` if that is given, else `max_bytes`.

    Raises
    ------
    CaptureError
        If the variable is not a size.

    Examples
    --------
    >>> bounds_or(None, None, {"TRACE_MAX_BYTES": "5kB"}), bounds_or(None, 9000, {"TRACE_MAX_BYTES": "5kB"})
    ((5000, None), (None, 5000))
    """
    value = environment.get(MAX_BYTES)
    if not value:
        return max_bytes, stop_at_bytes
    try:
        bound = size_of(value)
    except CaptureError as error:
        raise CaptureError(f"the environment variable {MAX_BYTES} is no bound: {error}") from None
    if stop_at_bytes is not None:
        return max_bytes, min(stop_at_bytes, bound)
    return bound if max_bytes is None else min(max_bytes, bound), None


def seconds_of(text: str | float) -> float:
    """The seconds in a number, or in a text such as ``"30s"`` or ``"2min"``.

    Raises
    ------
    CaptureError
        If the text is not a time, or the time is negative or infinite.

    Examples
    --------
    >>> seconds_of("30s"), seconds_of("1.5 min"), seconds_of("2h"), seconds_of(0)
    (30.0, 90.0, 7200.0, 0.0)
    """
    seconds = -1.0
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*(s|min|h|)\s*", text)
        try:
            seconds = float(match[1]) * _SECONDS[match[2]] if match else -1.0
        except ValueError:
            seconds = -1.0
    elif type(text) in (int, float):
        seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise CaptureError(f"{text!r} is not a time such as 30s, 2min or 1h")
    return seconds
