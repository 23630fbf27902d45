"""What metrics refuse as parameters: numbers out of range, and words that they do not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from tracer.errors import MessageError


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a whole or a real number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Whether a value is a whole number of at least this; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check(good: bool, rule: str, given: object) -> None:
    """Raise `MessageError` with the rule that a value breaks, unless it is good.

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
    """Raise `MessageError` unless a parameter is one of its words.

    Examples
    --------
    >>> check_word("per", "row", ("tensor", "channel"))
    Traceback (most recent call last):
        ...
    tracer.errors.MessageError: per is 'tensor' or 'channel', not 'row'
    """
    *others, last = words = tuple(words)
    check(given in words, f"{what} is {', '.join(map(repr, others))} or {last!r}", given)
