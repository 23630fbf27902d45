"""Replacements for functions of PyTorch that report their calls while a script runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tracer.observing.pytorch.patches import Differentiating


@contextmanager
def replaced(owner: type, name: str, ours: Any) -> Iterator[None]:
    """Replace an attribute inside this context; on exit, restore the original even if the attribute has changed again.

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
        if original is None:  # the attribute was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def called_as(original: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Give a stand-in the name, the docstring and the signature of a function."""
    return functools.update_wrapper(stand_in, original, ("__name__", "__doc__"), ())


def telling(original: Callable[..., None], tell: Callable[[Any], None]) -> Callable[..., None]:
    """A method that calls ``tell(self)`` after the original has returned."""

    def told(owner: Any, *args: Any, **kwargs: Any) -> None:
        original(owner, *args, **kwargs)
        tell(owner)

    return called_as(original, told)


def telling_backward(begins: Callable[[Tensor], None], ended: Callable[[], None]) -> Callable[..., None]:
    """A ``Tensor.backward`` that reports its begin and its end, but not those of nested calls."""
    original: Callable[..., None] = Tensor.backward
    running = Differentiating()

    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        if running.now:
            original(tensor, *args, **kwargs)
            return
        begins(tensor)
        running.now = True
        try:
            original(tensor, *args, **kwargs)
        finally:
            running.now = False
        ended()

    return called_as(original, backward)
