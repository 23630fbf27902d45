"""`WeakIdentitySet`: compares objects of a user's program by identity, whatever their classes define."""

from __future__ import annotations

import weakref
from typing import Any


class WeakIdentitySet:
    """A set of objects that are compared by identity and not kept alive. They need not be hashable.

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
        """Add an object at the end."""
        if one not in self:
            self._refs = {key: known for key, known in self._refs.items() if known() is not None}
            self._refs[id(one)] = weakref.ref(one)

    def alive(self) -> list[Any]:
        """The objects that still exist, in the order in which they were added."""
        return [one for one in (known() for known in self._refs.values()) if one is not None]

    def discard(self, one: object) -> None:
        """Remove an object, if it is there."""
        self._refs.pop(id(one), None)

    def clear(self) -> None:
        """Remove all objects."""
        self._refs = {}
