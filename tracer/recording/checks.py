"""Checks of what users give: each returns the value in its one form, or raises a `CaptureError` in a sentence.

A check that belongs to an option of the command line says there what may be typed, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar, final

from tracer.errors import CaptureError

Value = TypeVar("Value")
Check = Callable[[str, Any], Any]
"""``check(name, value) -> value``"""

_BYTES: Final = {"": 1} | {f"{name}i": 1024**power for power, name in enumerate("kmgt", 1)} | {
    name: 1000**power for power, name in enumerate("kmgt", 1)
}  # fmt: skip
_SECONDS: Final = {"": 1, "s": 1, "min": 60, "h": 3600}


@final
@dataclass(frozen=True)
class Whole:
    """A whole number that is at least `least`."""

    least: int = 1

    def __call__(self, name: str, value: Any) -> int:
        if type(value) is not int or value < self.least:
            raise CaptureError(f"{name} is a whole number from {self.least}, not {value!r}")
        return value


@final
@dataclass(frozen=True)
class OneOf:
    """One of several words."""

    words: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> Any:
        if value not in self.words:
            raise CaptureError(f"{name} is {' or '.join(map(repr, self.words))}, not {value!r}")
        return value


@final
@dataclass(frozen=True)
class Size:
    """A number of bytes, as `size_of` reads it."""

    least: int = 1

    def __call__(self, name: str, value: Any) -> int:
        return _named(name, size_of, value, self.least)


def from_zero(name: str, value: Any) -> Any:
    """A number that is not negative."""
    if type(value) not in (int, float) or not value >= 0:
        raise CaptureError(f"{name} is a number from 0, not {value!r}")
    return value


def share(name: str, value: Any) -> float:
    """A share, as `share_of` reads it."""
    return _named(name, share_of, value)


def seconds(name: str, value: Any) -> float:
    """A time, as `seconds_of` reads it."""
    return _named(name, seconds_of, value)


def _named(name: str, read: Callable[..., Value], *given: Any) -> Value:
    """What `read` gives; its error begins with the name of the option."""
    try:
        return read(*given)
    except CaptureError as error:
        raise CaptureError(f"{name}: {error}") from None


def option(default: Any, check: Check | None = None, help_text: str = "") -> Any:
    """A field of a dataclass of options.

    Parameters
    ----------
    default
        None says that None is allowed.
    check : Check, optional
    help_text : str
        The sentence for the command line; without it the command line has no such option.
    """
    return field(default=default, metadata={"check": check, "help_text": help_text})


def check_fields(options: Any, of: str = "") -> None:
    """Check each field of a dataclass of options, and put its value into its one form; `of` names it in sentences."""
    for one in fields(options):
        value, check = getattr(options, one.name), one.metadata.get("check")
        if check is not None and not (value is None and one.default is None):
            object.__setattr__(options, one.name, check(f"{one.name}{of}", value))


# -- numbers with units -------------------------------------------------------------------------------------------


def _with_unit(text: Any, units: dict[str, Any]) -> float:
    """The number in a text such as ``1.5 MiB``, times its unit; -1 if it is none."""
    match = re.fullmatch(r"\s*([0-9._eE+-]*[0-9.])\s*([a-zA-Z%]*)\s*", text)
    try:
        return float(match[1]) * units[match[2]] if match else -1
    except (KeyError, ValueError):
        return -1


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
    count: float = -1
    if isinstance(text, str):
        count = _with_unit(text.lower().rstrip().removesuffix("b"), _BYTES)
    elif type(text) is int:
        count = text
    if not least <= count < math.inf:
        raise CaptureError(f"{text!r} is not a size such as 500000, 256MB or 1.5GiB")
    return int(count)


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
    given = 0.0
    if isinstance(text, str):
        percent = text.rstrip().endswith("%")
        given = _with_unit(text, {"": 1, "%": 1}) / (100 if percent else 1)
    elif type(text) in (int, float):
        given = float(text)
    if not 0 < given <= 1:
        raise CaptureError(f"{text!r} is not a share such as 3% or 0.03, above 0 and at most 100%")
    return given


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
    given = -1.0
    if isinstance(text, str):
        given = _with_unit(text, _SECONDS)
    elif type(text) in (int, float):
        given = float(text)
    if not 0 <= given < math.inf:
        raise CaptureError(f"{text!r} is not a time such as 30s, 2min or 1h")
    return given
