"""Something else in the place of an attribute of a class of PyTorch's, for as long as a script runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: type, name: str, ours: Any) -> Iterator[None]:
    """Put something in the place of an attribute; afterwards what was there is there again, whatever stands there then.

    Examples
    --------
    >>> class Owner:
    ...     name = "theirs"
    >>> with replaced(Owner, "name", "ours"):
    ...     Owner.name
    'ours'
    >>> Owner.name
    'theirs'
    """
    original = vars(owner).get(name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if original is None:  # it was a parent's
            delattr(owner, name)
        else:
            setattr(owner, name, original)
