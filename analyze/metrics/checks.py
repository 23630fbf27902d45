"""Checks of the parameters of metrics: numbers in range, and known words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeGuard

from tracer.errors import MessageError


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Whether a value is an int of at least `least`, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check(good: bool, rule: str, given: object) -> None:
    """Raise `MessageError` with the rule and the given value, unless `good`.

    Examples
    --------
    >>> check(is_whole(0, 1), "lag is a positive integer", 0)
    Traceback (most recent call last):
        ...
    tracer.errors.MessageError: lag is a positive integer, not 0
    """
    if not good:
        raise MessageError(f"{rule}, not {given!r}")


def check_word(what: str, given: object, words: Iterable[str]) -> None:
    """Raise `MessageError` unless a parameter is one of the allowed words.

    Examples
    --------
    >>> check_word("per", "row", ("tensor", "channel"))
    Traceback (most recent call last):
        ...
    tracer.errors.MessageError: per is 'tensor' or 'channel', not 'row'
    """
    *others, last = words = tuple(words)
    check(given in words, f"{what} is {', '.join(map(repr, others))} or {last!r}", given)


def check_which(what: str, which: str | Iterable[str], good: Callable[[str], object], words: str) -> tuple[str, ...]:
    """The names in `which` as a tuple; a string is split at its plus signs.

    Raises `MessageError` if there are no names, or one is not `good` or repeated; `words` lists the good names.
    """
    names = tuple(which.split("+")) if isinstance(which, str) else tuple(which)
    for name in names:
        if not good(name):
            raise MessageError(f"there is no {what} {name!r}; there are {words}")
    if not names or len(set(names)) != len(names):
        raise MessageError(f"{what}s are named once each, at least one, not {', '.join(names) or 'none'}")
    return names
