"""Objects of a user's program, told apart by what they are and not by what they say of themselves."""

from __future__ import annotations

import weakref
from typing import Any


class WeakIdentitySet:
    """Objects by their identity, which are not kept alive: those of a program may compare and hash as they like.

    Examples
    --------
    >>> class Alike:
    ...     __hash__ = None
    ...     def __eq__(self, other):
    ...         return True
    >>> one, another = Alike(), Alike()
    >>> known = WeakIdentitySet()
    >>> known.add(one)
    >>> one in known, another in known, known.alive() == [one]
    (True, False, True)
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, one: object) -> bool:
        known = self._refs.get(id(one))
        return known is not None and known() is one

    def add(self, one: object) -> None:
        """Know one, after all that are known."""
        if one not in self:
            self._refs = {key: known for key, known in self._refs.items() if known() is not None}
            self._refs[id(one)] = weakref.ref(one)

    def alive(self) -> list[Any]:
        """Those that are still there, in the order in which they came to be known."""
        return [one for one in (known() for known in self._refs.values()) if one is not None]

    def discard(self, one: object) -> None:
        """Know it no more."""
        self._refs.pop(id(one), None)

    def clear(self) -> None:
        """Know none."""
        self._refs = {}
