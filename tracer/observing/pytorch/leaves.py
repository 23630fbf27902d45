"""Paths of tensors in a structure, which do not depend on the structure's other contents."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Named(dict[str, Any]):
    """Tensors by path, as made by `below`, of a structure that no longer exists."""


def below(path: str, key: object, number: int) -> str:
    """The path of the value under a key of the mapping at `path`; no other key has the same path.

    A string is used unchanged if it is unambiguous. All other keys are in brackets: other strings in quotes; numbers,
    None, members of enumerations, and tuples of these as literals. Any other key is represented by its class and
    number, because its text may only be its memory address.

    Parameters
    ----------
    path : str
        ``""`` for the outermost structure.
    key : object
    number : int
        The key's position in the mapping.

    Examples
    --------
    >>> [below("", key, 0) for key in ("logits", "0", 0, "a.b", ("user", "item"), object())]
    ['logits', '0', '[0]', '["a.b"]', '[("user","item")]', '[object 0]']
    >>> below(below("", "a", 0), "b", 0)
    'a.b'
    """
    # Dynamo must be able to trace this, because compiled graphs use these names too
    if isinstance(key, str) and key and "." not in key and "\n" not in key and key[0] != "[":
        name = str.__str__(key)
    else:
        name = "[" + _literal(key, number) + "]"
    return path + "." + name if path else name


def collect(value: Any, path: str, found: list[tuple[str, Tensor]]) -> None:
    """Add the tensors of a structure at `path` to `found`, each with its path.

    Dynamo traces this function, so it uses only what Dynamo supports.
    """
    if isinstance(value, Tensor):
        found.append((path, value))
    elif isinstance(value, Mapping):
        for number, (key, part) in enumerate(value.items()):
            collect(part, below(path, key, number), found)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            collect(getattr(value, name), f"{path}.{name}" if path else name, found)
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            collect(part, f"{path}.{index}" if path else str(index), found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            collect(getattr(value, field.name), f"{path}.{field.name}" if path else field.name, found)


def _literal(key: object, number: int) -> str:
    if isinstance(key, str):
        return '"' + key.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if key is None or isinstance(key, bool):
        return str(key)
    if isinstance(key, enum.Enum):
        return type(key).__qualname__ + "." + key.name
    if isinstance(key, int):
        return str(int(key))
    if isinstance(key, float):
        return repr(float(key))
    if type(key) is tuple:
        return "(" + ",".join([_literal(part, number) for part in key]) + ")"
    return type(key).__name__ + " " + str(number)


def arguments_of(args: Any, kwargs: Any) -> Any:
    """A call's arguments as one structure: positional arguments by number, keyword arguments by name.

    A tensor that is the only argument is returned itself. Dynamo traces this function too.
    """
    if not kwargs:
        return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args
    if type(kwargs) is Named:
        return kwargs
    named = {_argument(name): value for name, value in kwargs.items()}
    return {**{str(index): value for index, value in enumerate(args)}, **named}


def _argument(name: str) -> str:
    """The name of a keyword argument that cannot be mistaken for the number of a positional argument."""
    return "[" + name if name.isdecimal() or name.startswith("[") else name
